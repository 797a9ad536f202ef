"""Attention over a split sequence equals one device's, in every layout and by every method, with its gradients."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import attention
from moe_jax.layers.attend import Expansion
from moe_jax.layers.segments import segment_positions
from moe_jax.parallel import ContextParallel, context_attention, shard_sequence, starts_of_segments, unshard_sequence
from moe_jax.parallel.sequence import ring
from tests.helpers import seeds
from tests.helpers.meshes import make_mesh, relative_error

BATCH, SEQ, WIDTH, SCALE = 2, 96, 8, 0.4
HEADS = 8, 4
"""Heads of queries and of keys: one program of one device for all methods."""
SHARDED = P(None, "context")


def make(rng, heads, kv_heads, dtype=jnp.float32):
    """q, k, v and the gradient of the result."""
    shapes = ((BATCH, SEQ, count, WIDTH) for count in (heads, kv_heads, kv_heads, heads))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def packed(rng):
    """Documents of all lengths, one over many devices and many on one; ids that come again; padding at the end."""
    cuts = [np.sort(rng.choice(np.arange(1, SEQ), rng.integers(0, 12), replace=False)) for _ in range(BATCH)]
    ids = np.stack([np.searchsorted(c, np.arange(SEQ), side="right") % 5 + 1 for c in cuts])
    ids[:, SEQ - rng.integers(1, SEQ // 4) :] = 0
    return jnp.asarray(ids, jnp.int32)


@jax.jit
def on_one_device(arrays, segment_ids, window):
    q, k, v, direction = (a.astype(jnp.float32) for a in arrays)
    # Each run of equal ids is a segment of its own.
    runs = jnp.cumsum(segment_ids != jnp.roll(segment_ids, 1, axis=1), axis=1)

    def f(q, k, v):
        return attention(q, k, v, scale=SCALE, query_segment_ids=runs, key_segment_ids=runs, window=window)

    out, pullback = jax.vjp(f, q, k, v)
    return out, *pullback(direction)


def compare(results, arrays, segment_ids, window):
    for found, expected in zip(results, on_one_device(arrays, segment_ids, window), strict=True):
        # A token that sees itself alone has no gradient to q and k.
        scale = max(np.linalg.norm(expected), np.linalg.norm(arrays[-1]))
        assert np.linalg.norm(found - expected) < 2e-6 * scale


@functools.cache
def on_devices(devices, layout, method, hops="nccl", check_vma=True):
    """Returns the same function over several devices, jitted."""

    def local(q, k, v, segment_ids, window):
        parallel = ContextParallel(layout=layout, method=method, hops=hops)
        starts = parallel.starts_of_segments(segment_ids)
        return context_attention(q, k, v, scale=SCALE, parallel=parallel, segment_starts=starts, window=window)

    mesh = make_mesh(context=devices)
    specs = (SHARDED,) * 4 + (P(),)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SHARDED, check_vma=check_vma)

    def run(arrays, segment_ids, window):
        *arrays, direction = arrays
        q, k, v, ids = (shard_sequence(a, devices, layout) for a in (*arrays, segment_ids))
        out, pullback = jax.vjp(lambda q, k, v: sharded(q, k, v, ids, window), q, k, v)
        gradients = pullback(shard_sequence(direction, devices, layout))
        return [unshard_sequence(a, devices, layout) for a in (out, *gradients)]

    return jax.jit(run)


@pytest.mark.parametrize(
    "devices, layout, method, heads, kv_heads",
    [
        (4, "zigzag", "ring", *HEADS),
        (2, "striped", "all_gather", *HEADS),
        (4, "zigzag", "ulysses", *HEADS),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (4, "zigzag", "ring", 4, 1),
                (2, "contiguous", "ring", 2, 2),
                (3, "striped", "ring", 4, 2),
                (8, "zigzag", "all_gather", 4, 2),
            )
        ),
    ],
)
def test_equals_one_device(devices, layout, method, heads, kv_heads):
    rng = seeds.rng()
    run = on_devices(devices, layout, method)
    for window in (SEQ, 2**31 - 1, 1, *rng.integers(2, SEQ, 4)):
        arrays, ids, window = make(rng, heads, kv_heads), packed(rng), jnp.int32(window)
        compare(run(arrays, ids, window), arrays, ids, window)


@pytest.mark.parametrize(
    "devices, layout, at_once",
    [
        (4, "zigzag", 1),
        pytest.param(8, "striped", 3, marks=pytest.mark.thorough),
        pytest.param(4, "contiguous", 2, marks=pytest.mark.thorough),
    ],
)
def test_steps_of_several_devices(devices, layout, at_once, monkeypatch):
    """With peer-to-peer copies a ring step takes the keys of several devices; here `shard_map` does not check what varies."""
    rng = seeds.rng()
    of_one_device = 2 * BATCH * SEQ // devices * HEADS[1] * WIDTH * 4
    monkeypatch.setattr(ring, "MAX_KEY_BYTES_PER_STEP", at_once * of_one_device)
    run = on_devices.__wrapped__(devices, layout, "ring", hops="copies", check_vma=False)
    for window in (SEQ, *rng.integers(2, SEQ, 2)):
        arrays, ids, window = make(rng, *HEADS), packed(rng), jnp.int32(window)
        compare(run(arrays, ids, window), arrays, ids, window)


@pytest.mark.thorough
def test_bf16_error_does_not_grow_with_devices():
    """Takes twenty draws together: in one draw of few numbers errors differ by a tenth and more by chance."""
    rng = seeds.rng()
    draws = [make(rng, 4, 2, jnp.bfloat16) for _ in range(20)]
    ids = jnp.ones((BATCH, SEQ), jnp.int32)

    def of_all_draws(run):
        return [np.stack(arrays) for arrays in zip(*(run(arrays, ids, jnp.int32(SEQ)) for arrays in draws), strict=True)]

    expected = of_all_draws(on_one_device)
    errors = {}
    for devices in (1, 2, 8):
        found = of_all_draws(on_devices(devices, "zigzag", "ring"))
        errors[devices] = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    for devices in (2, 8):
        for of_ring, of_one in zip(errors[devices], errors[1], strict=True):
            assert of_ring < 1.1 * of_one < 6e-3, errors


def expand(weight, latents, k_shared):
    """Expands keys of a head for each entry of `weight`, with one last part for all heads, and narrower values."""
    k, v = jnp.split(jnp.einsum("bsr,hrd->bshd", latents, weight), [5], axis=-1)
    shared = jnp.broadcast_to(k_shared[:, :, None], (*k.shape[:3], WIDTH - 5))
    return jnp.concatenate([k, shared], axis=-1), v


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices, layout, method, hops, travels",
    [
        # A token has 9 numbers of kv and the start of its segment; with ulysses also queries and results of 4 heads of 8 and 4.
        (4, "zigzag", "ring", "copies", 3 * 9 + 1),
        (8, "striped", "all_gather", "nccl", 9 + 1),
        (4, "zigzag", "ulysses", "nccl", 4 * (8 + 4) + 9 + 2),
    ],
)
def test_latents_travel(devices, layout, method, hops, travels):
    """Results and gradients equal one device's with expanded keys; in bf16 the error is about as large as one device's."""
    rng, ids = seeds.rng(), packed(seeds.rng())
    runs = jnp.cumsum(ids != jnp.roll(ids, 1, axis=1), axis=1)
    shapes = (BATCH, SEQ, 4, WIDTH), (BATCH, SEQ, 6), (BATCH, SEQ, WIDTH - 5), (4, 6, 9), (BATCH, SEQ, 4, 4)
    *arrays, direction = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def whole(q, latents, k_shared, weight):
        k, v = expand(weight, latents, k_shared)
        return attention(q, k, v, scale=SCALE, query_segment_ids=runs, key_segment_ids=runs)

    def local(q, latents, k_shared, weight, ids):
        parallel, expansion = ContextParallel(layout=layout, method=method, hops=hops), Expansion(expand, weight)
        options = dict(scale=SCALE, parallel=parallel, segment_starts=parallel.starts_of_segments(ids))
        return context_attention(q, latents, k_shared, expansion=expansion, **options)

    specs = (SHARDED, SHARDED, SHARDED, P(), SHARDED)
    sharded = jax.shard_map(local, mesh=make_mesh(context=devices), in_specs=specs, out_specs=SHARDED)
    assert elements_that_leave(sharded, *arrays, ids) == travels * BATCH * SEQ / devices

    def split(q, latents, k_shared, weight):
        *parts, own_ids = (shard_sequence(a, devices, layout) for a in (q, latents, k_shared, ids))
        return unshard_sequence(sharded(*parts, weight, own_ids), devices, layout)

    def run(f, dtype):
        out, pullback = jax.vjp(f, *(a.astype(dtype) for a in arrays))
        return out, *pullback(direction.astype(dtype))

    run = jax.jit(run, static_argnums=(0, 1))
    expected = run(whole, jnp.float32)
    for dtype, limit in ((jnp.float32, lambda _: 2e-6), (jnp.bfloat16, lambda of_one: 1.8 * of_one)):
        of_one, found = run(whole, dtype), run(split, dtype)
        for exact, one, ours in zip(expected, of_one, found, strict=True):
            assert ours.dtype == dtype
            assert relative_error(ours, exact) < limit(relative_error(one, exact))


def elements_that_leave(f, *arguments):
    """Returns the number of elements that a device gives to collectives in the forward pass."""
    text = jax.jit(f).lower(*arguments).as_text()
    shapes = re.findall(r"stablehlo\.(?:all_|collective_).*: \(tensor<([\dx]+)x[fi]\d+>\) ->", text)
    return sum(math.prod(map(int, shape.split("x"))) for shape in shapes)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_weights_without_gradients(method):
    """Codes in FP8 and a key are passed to the expansion, and the other gradient equals one device's."""
    rng, codes = seeds.rng(), jnp.asarray(np.eye(WIDTH), jnp.float8_e4m3fn)
    q, latents = jnp.asarray(rng.normal(size=(1, 8, 1, WIDTH)), jnp.float32), jnp.asarray(rng.normal(size=(1, 8, WIDTH)))
    factor, latents = jnp.asarray(rng.normal(size=WIDTH), jnp.float32), latents.astype(jnp.float32)

    def expand(weights, latents):
        factor, codes, key = weights
        k = (latents * factor) @ codes.astype(jnp.float32) * key[0]
        return k[:, :, None], k[:, :, None]

    def local(factor, q, latents):
        expansion = Expansion(expand, (factor, codes, jnp.ones(2, jnp.uint32)))
        return context_attention(q, latents, scale=SCALE, parallel=ContextParallel(method=method), expansion=expansion)

    on_mesh = jax.shard_map(local, mesh=make_mesh(context=2), in_specs=(P(), SHARDED, SHARDED), out_specs=SHARDED)
    ids = dict.fromkeys(("query_segment_ids", "key_segment_ids"), jnp.ones((1, 8), jnp.int32))
    on_one = lambda factor: attention(q, *expand((factor, codes, jnp.ones(2)), latents), scale=SCALE, **ids)  # noqa: E731
    on_two = lambda factor: on_mesh(factor, shard_sequence(q, 2), shard_sequence(latents, 2))  # noqa: E731
    found, expected = (jax.jit(jax.grad(lambda factor, f=f: jnp.sum(f(factor) ** 2)))(factor) for f in (on_two, on_one))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_segments_across_devices():
    ids, layouts = packed(seeds.rng()), ("contiguous", "zigzag", "striped")

    def local(*parts):
        starts = [starts_of_segments(part, layout=layout) for part, layout in zip(parts, layouts, strict=True)]
        return starts, [ContextParallel(layout=layout).positions(of) for of, layout in zip(starts, layouts, strict=True)]

    on_mesh = jax.jit(jax.shard_map(local, mesh=make_mesh(context=8), in_specs=SHARDED, out_specs=SHARDED))
    for layout, starts, positions in zip(
        layouts, *on_mesh(*(shard_sequence(ids, 8, layout) for layout in layouts)), strict=True
    ):
        starts, positions = (unshard_sequence(a, 8, layout) for a in (starts, positions))
        np.testing.assert_array_equal(positions, segment_positions(ids))
        np.testing.assert_array_equal(starts, np.arange(SEQ) - segment_positions(ids))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": "ulysses"}, "over the 4 devices of axis 'context', .* got 8 and 2: use method 'ring' or 'all_gather'"),
        (
            {"method": "ulysses", "kv_heads": 8, "expand": lambda _, k, v: (k, v), "weights": jnp.ones((12, 2))},
            r"must be the 8 key heads, one after the other; got \[\(12, 2\)\]: use method 'ring'",
        ),
        ({"method": "usp"}, "unknown method 'usp'; choose one of 'ring', 'all_gather', 'ulysses'"),
        ({"layout": "zag"}, "unknown layout 'zag'"),
        ({"hops": "copy"}, "unknown hops 'copy'; choose one of 'nccl', 'copies'"),
        ({"backend": "mosaic"}, "backend 'mosaic' does not support this input: q, k and v must all be bfloat16"),
        ({"local": 3}, "layout 'zigzag' over 4 devices needs a sequence length that is a multiple of 8; got 12"),
        ({"expand": lambda _, k, v: (k, v[:, :2])}, r"k \(1, 4, 2, 8\), v \(1, 2, 2, 8\)"),
        ({"kv": 3}, "without an expansion, kv must be k and v; got 3 arrays"),
        ({"kv_heads": 3}, r"heads a multiple of kv_heads; got q \(1, 4, 8, 8\), k \(1, 4, 3, 8\)"),
        ({"window": 0}, "window must be at least 1 or None; got 0"),
        ({"window": np.int64(0)}, "window must be at least 1 or None; got 0"),
        ({"segment_starts": jnp.ones((1, 5))}, r"segment_starts must be \[batch, seq\] = \(1, 4\); got \(1, 5\)"),
    ],
)
def test_errors(change, message):
    change = dict(change)
    length, kv_heads, arrays = (change.pop(name, default) for name, default in (("local", 4), ("kv_heads", 2), ("kv", 2)))
    how = {name: change.pop(name) for name in ("layout", "method", "hops") if name in change}
    if "expand" in change:
        change["expansion"] = Expansion(change.pop("expand"), change.pop("weights", ()))

    def local(_):
        q, k = (jnp.zeros((1, length, heads, WIDTH)) for heads in (8, kv_heads))
        return context_attention(q, *[k] * arrays, scale=SCALE, parallel=ContextParallel(**how), **change)

    with pytest.raises(ValueError, match=message):
        jax.shard_map(local, mesh=make_mesh(context=4), in_specs=P("context"), out_specs=SHARDED)(jnp.zeros(4))
