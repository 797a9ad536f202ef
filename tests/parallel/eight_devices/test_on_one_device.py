"""Programs of one device in a process with eight: kernels are chosen as on a machine with one device."""

from functools import partial

import jax

from moe_jax.kernels.backends import on_one_device, splitting_refusal
from moe_jax.serving.placement import on_each
from moe_jax.train import init_state, make_optimizer
from moe_jax.train.compiled_step import TrainStep
from tests.helpers import tiny


def test_a_program_that_xla_may_split_has_no_kernels():
    assert "cannot split" in splitting_refusal()


def test_a_program_of_one_device_has_kernels():
    assert on_one_device(splitting_refusal)() is None
    assert "cannot split" in splitting_refusal()


def test_the_program_has_the_name_of_the_function():
    assert "module @jit_doubled" in jax.jit(on_one_device(partial(doubled, 1))).lower().as_text()


def doubled(x):
    return 2 * x


def test_an_engine_on_one_device_has_kernels():
    assert jax.jit(lambda x: on_each(None, lambda: (splitting_refusal() is None) * x)())(1) == 1


def test_a_training_step_on_one_device_has_kernels():
    refusals = []

    def function(one_device, state, frozen, batch):
        refusals.append(splitting_refusal())
        return state, {}

    state = init_state(tiny.model(), make_optimizer(1e-3))
    TrainStep(lambda remat: function, True, None, lambda *_: "unknown")(state, {})
    assert refusals == [None]
