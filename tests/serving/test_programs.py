"""Decoding steps take turns with copies of their program, each of which writes over its own results."""

import time

import jax
import numpy as np
import pytest
import seeds
from hf_reference import load_ours, reference

from moe_jax.serving.programs import COPIES, _at_once, step_programs
from moe_jax.serving.step import initial_state
from moe_jax.serving.upload import StepShape, empty_rows, packed
from moe_jax.serving.weights import take_apart

DECODES, CHUNKS = StepShape(1, 0, 0, 2), StepShape(0, 64, 1, 2)


@pytest.fixture(scope="module")
def programs_of_a_model():
    model = load_ours(reference("qwen3", int(seeds.rng().integers(2**31)), num_hidden_layers=1))
    served, weights = take_apart(model)
    leaves, tree = jax.tree.flatten(weights)
    state = initial_state(served, num_pages=4, num_slots=2, max_pages=2)
    return step_programs(served, tree, leaves, state, [DECODES, CHUNKS]), leaves, state


def test_copies(programs_of_a_model):
    programs, *_ = programs_of_a_model
    assert [programs[shape].num_copies for shape in (DECODES, CHUNKS)] == [COPIES, 1]


def test_copies_are_compiled_apart(monkeypatch):
    """XLA gives the same program again for the same options."""
    found = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, compiler_options: found.append(compiler_options))
    model = load_ours(reference("qwen3", 0, num_hidden_layers=1))
    served, weights = take_apart(model)
    leaves, tree = jax.tree.flatten(weights)
    step_programs(served, tree, leaves, initial_state(served, num_pages=4, num_slots=2, max_pages=2), [DECODES])
    assert len({str(options) for options in found}) == len(found) == COPIES


def test_turns_write_over_their_results(programs_of_a_model):
    programs, leaves, state = programs_of_a_model
    rows = empty_rows(DECODES)
    rows.decode_slots[0] = 0
    outputs, logits = [], []
    for position in range(2 * COPIES):
        rows.decode_positions[0], rows.decode_pages[0] = position, 1 if position == 0 else -1
        state, output = programs[DECODES](leaves, state, packed([rows]))
        outputs.append(output)
        logits.append(np.array(output.logits))
        state = state._replace(last_token=state.last_token.at[0].set(position + 1))
    # The arrays of the first turns were given away, and those of the last hold what they held.
    assert [output.logits.is_deleted() for output in outputs] == [True] * COPIES + [False] * COPIES
    for output, expected in zip(outputs[COPIES:], logits[COPIES:], strict=True):
        np.testing.assert_array_equal(output.logits, expected)
    assert len({array.tobytes() for array in logits}) == len(logits)


def test_the_longest_compilations_begin_first():
    lowered, shapes = [], [DECODES, CHUNKS, StepShape(8, 0, 0, 2), StepShape(0, 128, 1, 2)]
    programs = _at_once(shapes, lambda shape: lowered.append(shape) or shape, lambda shape, _: shape)
    assert lowered == [shapes[3], CHUNKS, DECODES, shapes[2]]
    assert list(programs) == shapes


def test_an_error_does_not_wait_for_all_programs(monkeypatch):
    """Neither one in lowering, behind many programs to compile, nor one in compiling."""
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
