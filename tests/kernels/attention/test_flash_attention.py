"""Fused attention equals its definition in f64, gradients too, in JAX's GPU interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from moe_jax.kernels.attention.mosaic import masks
from moe_jax.kernels.attention.mosaic.flash import flash_attention
from moe_jax.kernels.attention.mosaic.warpgroups import L2_BYTES, TileScheduler, WorkTile
from tests.helpers.lowered import num_kernels

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"))


def visible(segment_ids, window):
    index = np.arange(segment_ids.shape[1])
    seen = (index[:, None] >= index) & (np.asarray(segment_ids)[:, :, None] == np.asarray(segment_ids)[:, None, :])
    return seen if window is None else seen & (index[:, None] - window < index)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, q, k, v, dout, dlse):
    out, pullback = jax.vjp(f, q, k, v)
    return (*out, *pullback((dout, dlse)))


NEAR_EDGES = st.builds(lambda block, offset: 64 * block + offset, st.integers(1, 11), st.integers(-2, 1))
"""Where blocks end, and a token or two away."""

WINDOWS = st.none() | st.integers(1, 300) | NEAR_EDGES | st.just(2**31 - 1)


@pytest.mark.parametrize(
    "length, block_q, block_kv",
    [(768, 64, 128), (768, 128, 64), (128, 128, 128)],
    ids=["smaller blocks of queries", "smaller blocks of keys", "one block"],
)
@settings(max_examples=15, deadline=None)
@given(ends=st.sets(st.integers(1, 767) | NEAR_EDGES, max_size=7), window=WINDOWS)
def test_block_steps(length, block_q, block_kv, ends, window):
    """The steps cover exactly the blocks in sight, and steps without a mask have every pair visible."""
    ids = np.searchsorted(sorted(ends), np.arange(length), side="right")[None]
    seen = visible(ids, window)[0].reshape(ids.shape[1] // block_q, block_q, ids.shape[1] // block_kv, block_kv)
    some, every = seen.any(axis=(1, 3)), seen.all(axis=(1, 3))
    keys_in_sight = masks.TokenInterval(masks.first_keys(jnp.asarray(ids), window), None)
    queries_in_sight = masks.TokenInterval(None, masks.last_queries(jnp.asarray(ids), window))
    by_queries = np.asarray(masks.n_block_steps(keys_in_sight, ids.shape[1], block_q, block_kv))[0]
    by_keys = np.asarray(masks.m_block_steps(queries_in_sight, ids.shape[1], block_q, block_kv))[0]
    for row, direction, has_some, has_every in (
        *zip(by_queries, [-1] * len(some), some, every, strict=True),
        *zip(by_keys, [1] * len(some.T), some.T, every.T, strict=True),
    ):
        steps = masks.BlockSteps(*row)
        blocks = steps.start + direction * np.arange(steps.total)
        assert 1 <= steps.masked <= steps.full <= steps.total
        assert sorted(blocks) == list(np.flatnonzero(has_some))
        assert has_every[blocks[steps.masked : steps.full]].all()
        # The first block is always masked; no other masked block is seen whole.
        assert not has_every[np.concatenate([blocks[1 : steps.masked], blocks[steps.full :]])].any()


@pytest.mark.parametrize("longest, bytes_per_kv_head", [("first", None), ("last", L2_BYTES // 2)])
def test_tile_scheduler(longest, bytes_per_kv_head):
    """Every tile has one index; a section has two key heads where L2 holds two, and its longest tiles come first."""
    scheduler = TileScheduler(2, 6, 2, 3, longest, bytes_per_kv_head)
    tiles = [WorkTile(*map(int, scheduler._tile(jnp.int32(i)))) for i in range(2 * 6 * 3)]
    assert len(set(tiles)) == 36
    assert all(tile.kv_head == tile.head // 3 for tile in tiles)
    section = 36 if bytes_per_kv_head is None else 18
    for start in range(0, 36, section):
        part = tiles[start : start + section]
        assert [tile.block for tile in part] == sorted((tile.block for tile in part), reverse=longest == "last")
        assert len({(tile.batch, tile.kv_head) for tile in part}) == section // 9


@pytest.mark.parametrize(
    "batch, seq, heads, kv_heads, head_dim, value_dim",
    [
        (2, 4096, 128, 128, 192, 128),
        pytest.param(1, 4096, 16, 2, 256, 256, marks=pytest.mark.thorough),
        pytest.param(1, 32768, 32, 4, 128, 128, marks=pytest.mark.thorough),
        pytest.param(3, 1000, 6, 3, 64, 64, marks=pytest.mark.thorough),
    ],
)
def test_lowers_for_an_h200(batch, seq, heads, kv_heads, head_dim, value_dim):
    """Layouts and shared memory are checked while lowering; no GPU is needed."""

    def step(q, k, v, ids, dout, dlse):
        return with_gradients(lambda *a: flash_attention(*a, scale=0.1, segment_ids=ids, window=1024), q, k, v, dout, dlse)

    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)
    q, k, v, dout = (jax.ShapeDtypeStruct((batch, seq, *shape), jnp.bfloat16) for shape in shapes)
    ids, dlse = jax.ShapeDtypeStruct((batch, seq), jnp.int32), jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(step).trace(q, k, v, ids, dout, dlse).lower(lowering_platforms=("cuda",))
    assert num_kernels(lowered.as_text()) == (3 if head_dim + value_dim <= 256 else 4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (1, 8, 2, 96), "k": (1, 8, 1, 96)}, "head_dim must be 64, 128, 192 or 256; got 96"),
        ({"v": (1, 8, 1, 32)}, "value_dim must be 64, 128, 192 or 256; got 32"),
        ({"q": (1, 8, 3, 64), "k": (1, 8, 2, 64), "v": (1, 8, 2, 64)}, "heads must be a multiple of kv_heads; got 3 and 2"),
        ({"k": (1, 9, 1, 64)}, "k must have shape"),
        ({"dtype": jnp.float32}, "q, k and v must all be bfloat16 or all float16; got float32"),
        ({"scale": 0.0}, "scale must be positive; got 0.0"),
        ({"window": 0}, "window must be at least 1 or None; got 0"),
        ({"ids": (1, 7)}, "segment_ids must have shape"),
    ],
)
def test_refusals(change, message):
    given = {"q": (1, 8, 2, 64), "k": (1, 8, 1, 64), "v": (1, 8, 1, 64), "ids": (1, 8), "dtype": jnp.bfloat16, **change}
    q, k, v = (jnp.zeros(given[name], given["dtype"]) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        ids = jnp.zeros(given["ids"], jnp.int32)
        flash_attention(q, k, v, scale=given.get("scale", 1.0), segment_ids=ids, window=given.get("window"))
