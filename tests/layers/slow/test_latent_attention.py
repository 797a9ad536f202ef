"""Latent attention's cache holds latents: few queries read them in the absorbed form, many expand them, with equal results."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.attend import Attend
from moe_jax.layers.cache import init_cache
from moe_jax.layers.latent_attention import LatentAttention
from moe_jax.layers.lora import Adapter, Frozen
from moe_jax.layers.quantised import BlockScaled
from moe_jax.layers.rope import RopeTables
from moe_jax.parallel import ContextParallel
from tests.helpers import seeds, tiny

CALLS = {40: "expanded", 1: "absorbed"}
"""Tokens in a call, and the form that is used for that number of queries to cached tokens."""


def test_cached_calls_equal_one_forward():
    """Prompts of unequal lengths, padded on the left, in a cache with room to spare; many tokens after others too."""
    config = replace(tiny.deepseek().config, num_hidden_layers=2, first_k_dense_replace=2)
    model, rng = moe_jax.from_config(config, rngs=nnx.Rngs(0)), seeds.rng()
    calls = [40, 1, 1, 40, 1]
    tokens = jnp.asarray(rng.integers(1, 264, (3, sum(calls))), jnp.int32)
    segment_ids = jnp.asarray(np.arange(sum(calls)) >= np.array([[0], [7], [39]]), jnp.int32)
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    graph, state = nnx.split(model)

    @jax.jit
    def run(arrays, cache=None):
        output = nnx.merge(graph, state)(*arrays, cache=cache)
        return output.logits, output.cache

    cache, logits, done = init_cache(config, 3, sum(calls) + 5, jnp.float32), [], 0
    for count in calls:
        absorbed = model.stages[0].self_attn.absorbing_is_cheaper(count)
        assert CALLS[count] == ("absorbed" if absorbed else "expanded")
        of_call, cache = run([a[:, done : done + count] for a in (tokens, positions, segment_ids)], cache)
        logits.append(of_call)
        done += count
    whole, _ = run((tokens, positions, segment_ids))
    found, expected = (np.where(segment_ids[..., None] != 0, a, 0) for a in (jnp.concatenate(logits, axis=1), whole))
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.thorough
def test_the_absorbed_form_at_published_widths():
    """DeepSeek-V2-Lite's attention in bf16, compared with its expanded form in f32."""
    dtype, tolerance = jnp.bfloat16, 1e-2
    config, rng = NAMED_CONFIGS["deepseek-v2-lite"], seeds.rng()
    graph, state = nnx.split(LatentAttention(config, rngs=nnx.Rngs(int(rng.integers(2**31)))))
    x, angles = rng.normal(size=(2, 41, config.hidden_size)), rng.normal(size=(2, 41, 32))
    ids = jnp.asarray(np.arange(41) >= np.array([[0], [9]]), jnp.int32)

    rope = RopeTables(jnp.cos(angles), jnp.sin(angles))

    def attend(dtype, cache):
        attention = nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), state))
        assert attention.absorbing_is_cheaper(41)
        return attention(jnp.asarray(x, dtype), rope, Attend(ids, jnp.int32(3), cache=cache))

    room = jnp.pad(ids, ((0, 0), (0, 7)))
    # This makes the cache one that may hold tokens: an empty cache is not read.
    found, cache = attend(dtype, replace(init_cache(config, 2, 48, dtype), segment_ids=room, written=jnp.int32(0)))
    expected, _ = attend(jnp.float32, None)
    assert found.dtype == dtype
    found, expected = (np.where(ids[..., None] != 0, a, 0).astype(np.float32) for a in (found, expected))
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)
    # The fourth layer's rows alone are written.
    assert [bool(of_layer.any()) for of_layer in cache.kept[0][:5, :, :41]] == [False, False, False, True, False]
    assert not cache.kept[0][3, :, 41:].any()


def test_cache_of_v3():
    """It holds 576 numbers per token."""
    cache = jax.eval_shape(partial(init_cache, NAMED_CONFIGS["deepseek-v3"], 2, 100, jnp.bfloat16))
    assert [a.shape for a in cache.kept] == [(61, 2, 100, 576)]


@pytest.mark.parametrize("kind", ["an adapter", "codes in FP8"])
def test_rows_of_heads(kind):
    """With `ulysses` an adapter's a and scales in FP8 have no rows of heads."""
    config = replace(tiny.deepseek_config(), kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64)
    attention = LatentAttention(config, rngs=nnx.Rngs(0))
    matrix = attention.kv_b_proj
    if kind == "an adapter":
        matrix.lora = Adapter((4, 128), (matrix.weight.shape[0], 4), scale=1.0, rngs=nnx.Rngs(0))
    else:
        matrix.weight, matrix.in_fp8 = Frozen(BlockScaled.fp8(matrix.weight[...], jnp.float32)), True
    tables = RopeTables(*jnp.ones((2, 1, 4, config.qk_rope_head_dim // 2)))
    attend = Attend(jnp.zeros((1, 4), jnp.int32), jnp.int32(0), context=ContextParallel(method="ulysses"))
    with pytest.raises(ValueError, match=f"the rows of its heads in kv_b_proj, which has {kind}: use method 'ring'"):
        jax.eval_shape(lambda x: attention(x, tables, attend), jnp.ones((1, 4, config.hidden_size)))
