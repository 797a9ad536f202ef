"""A step's logits equal the model's, no matter what shares the step: chunks of prompts, decoding rows, padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.step import StepShape, empty_rows, initial_state, packed, step, unpacked
from moe_jax.serving.weights import take_apart
from tests.helpers import seeds
from tests.helpers.hf_reference import load_ours, reference

MAX_PAGES = 3

MODELS = {
    "moe-sliding-mixed": (
        "qwen3_moe",
        {
            "num_hidden_layers": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
    ),
    "dense": ("qwen3", {}),
    "deepseek": ("deepseek_v3", {"first_k_dense_replace": 1}),
}


FURTHER = [pytest.param(name, marks=pytest.mark.thorough) for name in ("dense", "deepseek")]


@pytest.mark.parametrize("name", ["moe-sliding-mixed", *FURTHER])
def test_chunks_and_decodes_equal_the_model(name):
    rng = seeds.rng()
    model_type, overrides = MODELS[name]
    model = load_ours(reference(model_type, int(rng.integers(2**31)), **overrides))
    vocab = model.config.vocab_size
    long, short = (rng.integers(0, vocab, n) for n in (PAGE_SIZE + 9, 5))
    served, weights = take_apart(model)
    state = initial_state(served, num_pages=8, num_slots=4, max_pages=MAX_PAGES, keep_experts=True)
    mixed = program(served, StepShape(2, 80, 2, MAX_PAGES))
    tables = np.array([[5, 2, 0], [3, 0, 0]], np.int32)

    # The long prompt's first 40 tokens alone, in slot 2.
    rows = empty_rows(StepShape(2, 80, 2, MAX_PAGES))
    rows.chunk_tokens[:40], rows.chunk_tables[0] = long[:40], tables[0]
    rows.chunk_slots[0], rows.chunk_counts[0] = 2, 40
    state, _ = mixed(weights, state, packed([rows]))

    # The rest of it but one token, and the whole short prompt, in slot 0.
    rows = empty_rows(StepShape(2, 80, 2, MAX_PAGES))
    rest = len(long) - 41
    rows.chunk_tokens[: rest + len(short)] = np.concatenate([long[40:-1], short])
    rows.chunk_slots[:], rows.chunk_starts[:], rows.chunk_counts[:] = (2, 0), (40, 0), (rest, len(short))
    rows.chunk_tables[:], rows.chunk_samples[:] = tables, (0, 1)
    state, out = mixed(weights, state, packed([rows]))
    assert out.slots.tolist() == [-1, -1, -1, 0]
    assert out.positions.tolist()[2:] == [len(long) - 1, len(short)]
    expected = logits_of(model, short)
    np.testing.assert_allclose(out.logits[3], expected[-1], rtol=1e-4, atol=1e-4)

    # One token of each, in another order of rows, the short one's drawn by nobody but the test.
    state = state._replace(last_token=state.last_token.at[jnp.array([0, 2])].set(jnp.array([7, long[-1]])))
    decode = program(served, StepShape(4, 0, 0, MAX_PAGES))
    rows = empty_rows(StepShape(4, 0, 0, MAX_PAGES))
    rows.decode_slots[:3], rows.decode_positions[:3] = (2, -1, 0), (len(long) - 1, 0, len(short))
    state, out = decode(weights, state, packed([rows]))
    assert out.slots.tolist() == [2, -1, 0, -1]
    np.testing.assert_allclose(out.logits[0], logits_of(model, long)[-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.logits[2], logits_of(model, [*short, 7])[-1], rtol=1e-4, atol=1e-4)
    if model.config.moe_layers:
        expected = whole_pass(model, padded(long)).expert_ids[:, 0, : len(long)]
        experts = np.concatenate([state.experts[5], state.experts[2]])[: len(long)]
        assert (np.sort(experts.transpose(1, 0, 2)) == np.sort(expected)).all()


def test_a_model_that_is_taken_over_leaves_no_second_copy():
    model = load_ours(reference("qwen3_moe", 0))
    _, kept = take_apart(model)
    expected = jax.tree.map(np.asarray, kept)
    stacks = jax.tree.leaves(nnx.state(model.stages))
    _, taken = take_apart(model, take_over=True)
    jax.tree.map(np.testing.assert_array_equal, taken, expected)
    experts = {id(leaf) for leaf in jax.tree.leaves(taken.experts)}
    assert experts and all(leaf.is_deleted() == (id(leaf) not in experts) for leaf in stacks)


def test_rows_survive_the_upload():
    rng = seeds.rng()
    shape = StepShape(3, 5, 2, MAX_PAGES)
    rows = jax.tree.map(lambda a: rng.integers(-1, 9, a.shape, np.int32), empty_rows(shape))
    jax.tree.map(np.testing.assert_array_equal, unpacked(packed([rows]), shape), rows)


def program(served, shape):
    return jax.jit(partial(step, served, shape))


def logits_of(model, tokens):
    """Returns the logits of every position of one sequence."""
    return np.asarray(whole_pass(model, padded(tokens)).logits[0, : len(tokens)])


def padded(tokens):
    """Returns a row of one length, so that all sequences have one program."""
    return np.pad(np.asarray(tokens), (0, PAGE_SIZE + 9 - len(tokens)))[None]


@nnx.jit
def whole_pass(model, tokens):
    return model(tokens)
