"""`remat="auto"`: the number of layers that keep their residuals, from the model of cost and the compiled program's memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep
from moe_jax.cost.memory import activations, kept_parts, memory_bytes
from moe_jax.models.remat import layers_and_parts, remat_option
from moe_jax.parallel.choices import MeshShape
from moe_jax.train import compiled_step, init_state, make_optimizer, make_train_step, put_batch
from moe_jax.train.compiled_step import GIB, SPARE, Room, TrainStep, most_kept, planned_step
from tests.helpers import tiny
from tests.helpers.train_steps import make_batch

PLANNED = PlannedStep(NAMED_CONFIGS["qwen3-30b-a3b"], MeshShape(fsdp=4), 32, 4096, moment_dtype="bfloat16", hops="copies")
ROOM = Room(132 * GIB, 75 * GIB)
FREE = ROOM.free - SPARE * ROOM.limit


@pytest.fixture(scope="module")
def state():
    return init_state(tiny.model(), make_optimizer(1e-3))


def prepared(monkeypatch, state, needs, room=ROOM, planned=PLANNED):
    """Returns the step after its choice, the line about it, and the numbers whose programs were compiled.

    Args:
      needs: the bytes that a program needs in addition to its arguments, by its number of layers.
    """
    numbers = []

    def function_of(remat):
        numbers.append(remat)
        return lambda one_device, state, frozen, batch: (state, {})

    step = TrainStep(function_of, "auto", None, lambda state, batch: planned)
    monkeypatch.setattr(compiled_step, "room_of", lambda state: room)
    monkeypatch.setattr(compiled_step, "needed_bytes", lambda program: needs(numbers[-1]))
    monkeypatch.setattr(TrainStep, "compiled", lambda *_: None)
    told = step.prepare(state, {})
    # The first function is made to check the options.
    return step, told, numbers[1:]


CHOSEN = most_kept(PLANNED, FREE)
NUMBER, KEEP = CHOSEN.num_kept, CHOSEN.keep
LAYER = activations(PLANNED, PLANNED.stages[-1]) - kept_parts(CHOSEN, PLANNED.stages[-1])


def test_as_many_layers_and_parts_keep_their_residuals_as_fit(monkeypatch, state):
    assert 0 < NUMBER < 48 and KEEP
    step, told, options = prepared(monkeypatch, state, lambda remat: FREE)
    assert options == [step.remat] == [remat_option(NUMBER, KEEP)]
    gib = (ROOM.limit - ROOM.free + FREE) / GIB
    kept = f"the last {NUMBER} of 48 layers keep their residuals, the others keep {', '.join(KEEP)}"
    assert told == f"remat: {kept} ({gib:.1f} GiB of 132.0 GiB)"
    assert step.prepare(state, {}) == ""


def test_a_program_that_needs_too_much_gets_fewer_layers(monkeypatch, state):
    def needs(remat):
        return FREE + LAYER * (layers_and_parts(remat)[0] - NUMBER + 1.5)

    step, _, options = prepared(monkeypatch, state, needs)
    fewer = remat_option(NUMBER - 2, KEEP)
    assert options == [remat_option(NUMBER, KEEP), fewer] and step.remat == fewer


def test_at_most_four_programs_are_compiled(monkeypatch, state):
    """Each leaves more room than the last, however large a layer is."""
    step, told, options = prepared(monkeypatch, state, lambda remat: FREE + LAYER)
    fewer = [remat_option(NUMBER - number, KEEP) for number in (0, 1, 3)]
    assert options == [*fewer, 0] and step.remat == 0
    assert told.startswith("remat: all 48 layers are recomputed (")


def test_parts_alone_that_need_too_much_are_left_out(monkeypatch, state):
    room = ROOM._replace(free=ROOM.free - (NUMBER - 1) * LAYER)
    step, told, options = prepared(monkeypatch, state, lambda remat: room.free if remat else 0, room)
    assert [layers_and_parts(option)[0] for option in options][-1] == 0 and step.remat == 0


@pytest.mark.parametrize(
    "room, planned, reason", [(None, PLANNED, "the memory limit is unknown"), (ROOM, "a pipe keeps all", "a pipe keeps all")]
)
def test_without_a_prediction_all_layers_are_recomputed(monkeypatch, state, room, planned, reason):
    step, told, numbers = prepared(monkeypatch, state, lambda number: 0, room, planned)
    assert step.remat is True and numbers == [True]
    assert told == f"remat: all layers are recomputed, because {reason}"


def test_most_kept_is_the_largest_number_that_fits():
    def in_addition_to_state(number):
        parts = memory_bytes(replace(CHOSEN, num_kept=number))
        return sum(parts.values()) - parts["parameters"] - parts["moments"]

    assert in_addition_to_state(NUMBER) <= FREE < in_addition_to_state(NUMBER + 1)
    nothing, everything = most_kept(PLANNED, 0), most_kept(PLANNED, 1e15)
    assert (nothing.num_kept, nothing.keep, everything.num_kept) == (0, (), 48)


def test_the_model_of_cost_knows_the_step(rng):
    model = tiny.model(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    state = init_state(model, make_optimizer(1e-3))
    batch = put_batch(make_batch(rng), state.params)
    found = planned_step(nnx.graphdef(model), None, 2, False, state, batch)
    assert found == PlannedStep(model.config, MeshShape(), 8, 16, gradient_accumulation=2, overlap_micro_batches=False)


def test_a_step_in_float32_has_no_prediction(state):
    assert "no prediction for dtype float32" in planned_step(nnx.graphdef(tiny.model()), None, 1, False, state, {})


@pytest.mark.parametrize(
    "remat, planned, advice",
    [
        (True, PLANNED, "All layers are recomputed already"),
        (0, PLANNED, "All layers are recomputed already"),
        (False, PLANNED, "Give remat=42 (--remat 42)"),
        (16, PLANNED, "Give remat=14 (--remat 14)"),
        ("16,router", PLANNED, "Give remat=16 (--remat 16), which keeps no parts of other layers."),
        (False, "a pipe keeps all", "Give remat=True"),
    ],
)
def test_an_error_about_memory_names_the_number_to_give(monkeypatch, state, remat, planned, advice):
    def out_of_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    step = TrainStep(lambda remat: None, remat, None, lambda state, batch: planned)
    monkeypatch.setattr(TrainStep, "_jit", lambda *_: out_of_memory)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        step(state, {})
    assert error.value.__notes__[0].startswith(advice)


def test_an_unknown_remat_is_refused(state):
    with pytest.raises(ValueError, match="remat must be True, False, 'offload' or a number of layers .* got 'most'"):
        make_train_step(nnx.graphdef(tiny.model()), make_optimizer(1e-3), remat="most")


@pytest.mark.parametrize("remat, fills", [(True, False), (False, False), (2, True), ("0,attention", True)])
def test_xla_recomputes_nothing_next_to_kept_layers(state, remat, fills):
    """XLA would, where its own estimate is above 95 % of the memory: a step near the limit became 28 % slower."""
    step = TrainStep(lambda remat: lambda one_device, state, frozen, batch: (state, {}), remat, None, lambda *_: PLANNED)
    step._jit(state).lower(state.without_frozen, state.frozen, {}).compile()  # XLA knows the option
    assert bool(step._compiler_options()) == fills
