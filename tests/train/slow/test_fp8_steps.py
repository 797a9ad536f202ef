"""Training with experts in FP8: copies made once a step, recomputation, sums over micro-batches, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.kernels import Precision
from moe_jax.kernels.experts.fp8 import dense, xla
from moe_jax.models.execution import Execution
from moe_jax.train import NextToken
from moe_jax.train.gradients import accumulate, accumulate_in_place, gradients_fn
from moe_jax.train.on_devices import with_fp8_copies
from tests.helpers import seeds, tiny
from tests.helpers.lowered import launches_on_h200


def _model(precision="fp8", dense=()):
    made = tiny.model_for_fp8()
    made.set_precision(precision, dense)
    return made


def _batch(rows=4, length=16, rng=None):
    rng = rng or seeds.rng()
    tokens = rng.integers(0, 264, (rows, length + 1))
    arrays = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=np.ones((rows, length)))
    arrays |= dict(positions=np.tile(np.arange(length), (rows, 1)), segment_ids=np.ones((rows, length)))
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def _gradients(how, model, batch, copies):
    """Returns value and gradients of both micro-batches of a batch."""
    graph, params = nnx.split(model, nnx.Param)
    objective = NextToken(micro_batches=2)
    execution = Execution(remat=True)
    if how == "in place":
        gradients = accumulate_in_place(objective, graph, execution, 2)
    else:
        gradients = accumulate(gradients_fn(objective, graph, execution), 2)

    def of_params(params, batch):
        fixed = nnx.State({})
        if copies:
            fixed = with_fp8_copies(graph, params, fixed, None)
        return gradients(params, fixed, objective.prepare(batch, jnp.float32(64)))

    found = jax.jit(of_params)(params, batch)
    return found.value, found.gradients


def _assert_equal(a, b):
    """XLA may leave out other roundings to bf16 in the second program: a few numbers may then be neighbours."""
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=2**-6, err_msg=name)
        assert np.mean(np.asarray(x) != np.asarray(y)) < 1e-3, name


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["in place", "added"])
def test_copies_made_once_give_the_same(how):
    """Copies of experts and of attention's projections.

    One batch for all runs: some have a number between two of FP8, or a token with two equal experts, up to rounding.
    """
    model, batch = _model(dense=("attention",)), _batch(rng=np.random.default_rng(0))
    _assert_equal(_gradients(how, model, batch, copies=True), _gradients(how, model, batch, copies=False))


def test_copies_are_not_made_again(monkeypatch):
    """With copies at hand no pass rounds a matrix, and nothing is differentiated in the copies."""
    model, batch = _model(dense=("attention",)), _batch()
    graph, params = nnx.split(model, nnx.Param)
    fixed = with_fp8_copies(graph, params, nnx.State({}), None)
    assert len(jax.tree.leaves(fixed)) == 4 * (2 + 4), "values and scales of experts' matrices and projections in two orders"
    for module in (xla, dense):
        monkeypatch.setattr(module, "quantise_matrices", None)
    gradients = gradients_fn(NextToken(), graph, Execution(remat=True))
    found = jax.eval_shape(gradients, params, fixed, NextToken().prepare(batch, jnp.float32(64)))
    assert jax.tree.structure(found.gradients) == jax.tree.structure(params)


def test_one_gpu_rounds_weights_in_a_kernel():
    """One launch for each of the experts' two matrices in bf16. For several GPUs XLA rounds: it splits no kernel."""
    graph, params = nnx.split(_model(), nnx.Param)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), params)
    for one, launches in ((True, 2), (False, 0)):
        copies = partial(with_fp8_copies, graph, fixed=nnx.State({}), parallelism=None, on_one_device=one)
        found = launches_on_h200(copies, types)
        assert [each.params["name"] for each in found] == ["fp8_round_matrices"] * launches


def test_refusals():
    with pytest.raises(ValueError, match="hidden is 16; it must be a multiple of 128"):
        tiny.model(dtype=jnp.bfloat16).set_precision("fp8")
    with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
        tiny.model_for_fp8(dtype=jnp.float32).set_precision("fp8")
    with pytest.raises(ValueError, match="this model has none"):
        tiny.dense(dtype=jnp.bfloat16).set_precision("fp8")
    model = _model()
    for wrong in ("FP8", 8, True, jnp.float32, ["fp8"]):
        with pytest.raises(ValueError, match="precision .* must be one of 'bf16', 'fp8', 'fp8_kept'"):
            model.set_precision(wrong)
    assert model.precision == Precision()
    model.set_precision("bf16")
    assert model.precision is None
