"""Decoding steps write over their last results; the programs that take the longest to compile come first."""

import time

import jax
import numpy as np
import pytest

from moe_jax.serving.device import _for_drawing
from moe_jax.serving.programs import _at_once, step_programs
from moe_jax.serving.step import StepBatch, StepOutput, StepShape, empty_rows, initial_state, packed
from moe_jax.serving.weights import take_apart
from tests.helpers import seeds
from tests.helpers.hf_reference import load_ours, reference

DECODES, CHUNKS = StepShape(1, 0, 0, 2), StepShape(0, 64, 1, 2)


@pytest.fixture(scope="module")
def programs_of_a_model():
    model = load_ours(reference("qwen3", int(seeds.rng().integers(2**31)), num_hidden_layers=1))
    served, weights = take_apart(model)
    leaves, tree = jax.tree.flatten(weights)
    state = initial_state(served, num_pages=4, num_slots=2, max_pages=2)
    return step_programs(served, tree, leaves, state, [DECODES, CHUNKS]), leaves, state


def test_a_step_writes_over_the_last(programs_of_a_model):
    programs, leaves, state = programs_of_a_model
    rows = empty_rows(DECODES)
    rows.decode_slots[0] = 0
    # A step takes its state.
    (program, output), state, outputs, logits = programs[DECODES], jax.tree.map(np.array, state), [], []
    for position in range(2):
        rows.decode_positions[0], rows.decode_pages[0] = position, 1 if position == 0 else -1
        state, output = program(leaves, state, packed([rows]), output)
        outputs.append(output)
        logits.append(np.array(output.logits))
        state = state._replace(last_token=state.last_token.at[0].set(position + 1))
    # The arrays of the first step were given away, and the arrays of the last are unchanged.
    assert [output.logits.is_deleted() for output in outputs] == [True, False]
    np.testing.assert_array_equal(outputs[1].logits, logits[1])
    assert not np.array_equal(*logits)


def test_a_step_with_chunks_makes_new_arrays(programs_of_a_model):
    programs, leaves, state = programs_of_a_model
    # A step takes its state.
    (program, over), state, outputs = programs[CHUNKS], jax.tree.map(np.array, state), []
    for _ in range(2):
        state, output = program(leaves, state, packed([empty_rows(CHUNKS)]), over)
        outputs.append(output)
    assert over is None and not any(output.logits.is_deleted() for output in outputs)


def test_steps_with_as_many_rows_are_drawn_by_one_program():
    def drawn(tokens):
        of_rows, positions = np.zeros(3, np.int32), np.zeros(5, np.int32)
        drafted = StepBatch(of_rows, *[np.zeros(tokens, np.int32)] * 5)
        return _for_drawing(StepOutput(np.zeros((5, 7)), of_rows, positions, np.zeros((tokens, 2)), drafted))

    assert [jax.tree.map(np.shape, drawn(tokens)) for tokens in (128, 256)] == [jax.tree.map(np.shape, drawn(64))] * 2
    assert {np.shape(array) for array in jax.tree.leaves(drawn(64))} == {(5, 7), (3,), (5,)}


def test_the_longest_compilations_begin_first():
    lowered, shapes = [], [DECODES, CHUNKS, StepShape(8, 0, 0, 2), StepShape(0, 128, 1, 2)]
    programs = _at_once(shapes, lambda shape: lowered.append(shape) or shape, lambda shape, _: shape)
    assert lowered == [shapes[3], CHUNKS, DECODES, shapes[2]]
    assert list(programs) == shapes


def test_an_error_does_not_wait_for_all_programs(monkeypatch):
    """Neither one in lowering, after many programs to compile, nor one in compiling."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    shapes, compiled = [StepShape(rows, 0, 0, 2) for rows in range(1, 42)], []

    def lower(shape):
        if shape == shapes[-1]:
            raise ValueError("not lowered")
        return shape

    def compile_slowly(shape, lowered):
        compiled.append(shape)
        time.sleep(0.02)
        if shape.decodes == 3 and lowered is None:
            raise ValueError("not compiled")

    with pytest.raises(ValueError, match="not lowered"):
        _at_once(shapes, lower, compile_slowly)
    with pytest.raises(ValueError, match="not compiled"):
        _at_once(shapes, lambda _: None, compile_slowly)
    assert len(compiled) < len(shapes)
