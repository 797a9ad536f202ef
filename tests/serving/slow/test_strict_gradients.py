"""Strict log-probabilities of packed and padded rows have each document's own bits and the gradients of training."""

from dataclasses import replace
from functools import partialmethod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax import train
from moe_jax.config import Qwen3Config
from moe_jax.layers.segments import has_successor, shift_left
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.parallel.spread import Spread
from moe_jax.serving import fused
from moe_jax.serving.strict_log_probs import in_pages, strict_log_probs
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole
from tests.serving.slow.test_fused import CONFIG as FUSED_CONFIG

MOE = replace(FUSED_CONFIG, vocab_size=128)
DENSE = Qwen3Config(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    tie_word_embeddings=True,
)
SEGMENT_IDS = jnp.asarray([np.repeat(ids, lengths) for ids, lengths in (((7, 8, 7, 0), (3, 66, 12, 4)), ((2, 0), (66, 19)))])


@pytest.mark.parametrize("config", [DENSE, pytest.param(MOE, marks=pytest.mark.thorough)])
def test_gradients(config, monkeypatch):
    """Each parameter's gradient equals that of `train.log_probs` with the strict pass's experts; values are the documents'."""
    model, rng = moe_jax.from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0)), seeds.rng()
    if config is MOE:
        # Three experts are nearly equal: the ordinary pass chooses other two of them than the strict pass.
        router = model.stages[1].mlp.router.weight
        noise = 1 + 0.003 * jnp.asarray(rng.normal(size=router.shape), jnp.float32)
        router[...] = jnp.repeat(router[...][:, :43], 3, axis=1)[:, :128] * noise
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, SEGMENT_IDS.shape), jnp.int32)
    factors = jnp.asarray(rng.normal(size=(2, 84)), jnp.float32)
    chosen, fused_layers = [], fused.fused_layers

    def recorded(*args):
        chosen.append(fused_layers(*args))
        return chosen[-1]

    @jax.jit
    def strict(state):
        def loss(state):
            found = strict_log_probs(nnx.merge(graphdef, state), tokens, SEGMENT_IDS, max_segments=4)
            return (found * factors).sum(), (found, chosen.pop()[2])

        return jax.grad(loss, has_aux=True)(state)

    @jax.jit
    def trained(state):
        mask = has_successor(SEGMENT_IDS, 1).astype(jnp.int32)
        batch = {"tokens": tokens, "labels": shift_left(tokens, 1), "loss_mask": mask, "segment_ids": SEGMENT_IDS}
        return jax.grad(lambda state: (train.log_probs(nnx.merge(graphdef, state), batch)[:, :-1] * factors).sum())(state)

    monkeypatch.setattr(fused, "fused_layers", recorded)
    gradients, (found, experts) = strict(state)
    if experts:
        # Padding chooses no expert. Any will do: nobody reads its result.
        replayed = jnp.stack(experts).reshape(-1, *SEGMENT_IDS.shape, 2) % config.num_experts
        monkeypatch.setattr(Decoder, "hidden_states", partialmethod(Decoder.hidden_states, expert_ids=replayed))
    expected = trained(state)
    for (path, own), other in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5 * float(np.abs(other).max()), err_msg=str(path))
    monkeypatch.undo()
    of_document = nnx.jit(strict_log_probs)
    for row, start, end in ((0, 3, 69), (1, 0, 66)):
        alone = of_document(model, tokens[row : row + 1, start:end])[0]
        np.testing.assert_array_equal(found[row, start : end - 1], alone)
    assert not np.asarray(found)[~np.asarray(has_successor(SEGMENT_IDS, 1))[:, :-1]].any()


def test_pages():
    """Each segment's tokens are in order in pages of its own, which its row of queries names."""
    rows, seq = SEGMENT_IDS.shape
    packed = whole(in_pages)(SEGMENT_IDS, 5)
    np.testing.assert_array_equal(packed.num_segments, [4, 2])
    owners = {}
    for segment, (begin, end) in enumerate(zip(packed.queries.first_query, packed.queries.first_query[1:], strict=False)):
        assert packed.queries.num_keys[segment] == end - begin
        index = np.arange(end - begin)
        np.testing.assert_array_equal(packed.positions[begin:end], index)
        np.testing.assert_array_equal(packed.places.offset[begin:end], index % 64)
        np.testing.assert_array_equal(packed.places.page[begin:end], packed.queries.page_table[segment][index // 64])
        for page in set(packed.places.page[begin:end].tolist()):
            assert page < packed.num_pages and owners.setdefault(page, segment) == segment
    assert packed.queries.first_query[-1] == rows * seq


@pytest.mark.parametrize("length", [1, 65])
def test_enough_pages(length):
    """Rows with the most segments find room: segments of one token, and of one more than a page."""
    ids = jnp.asarray(np.repeat(np.arange(3) + 1, length)[None])
    packed = whole(in_pages)(ids, 3)
    found = [(int(page), int(offset)) for page, offset in zip(*packed.places, strict=True)]
    assert len(set(found)) == 3 * length and max(page for page, _ in found) < packed.num_pages


def test_refused():
    model = moe_jax.from_config(DENSE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="segment_ids must have tokens' shape"):
        strict_log_probs(model, jnp.zeros_like(SEGMENT_IDS), SEGMENT_IDS[:, 1:])
    with pytest.raises(ValueError, match="max_segments must be .* got 3 for a row with 4"):
        strict_log_probs(model, jnp.zeros_like(SEGMENT_IDS), SEGMENT_IDS, max_segments=3)
    model.execution = Execution(spread=Spread(mesh_axes=("data",)))
    with pytest.raises(ValueError, match="one device"):
        strict_log_probs(model, jnp.zeros_like(SEGMENT_IDS))
