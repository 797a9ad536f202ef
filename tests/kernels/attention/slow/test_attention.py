"""Attention equals its definition, written out in f64 one query at a time; chunking changes nothing."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moe_jax.kernels.attention.api import attention
from moe_jax.kernels.attention.mosaic import flash
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole

# The package exports the function under the module's name.
module = importlib.import_module("moe_jax.kernels.attention.api")


def definition(q, k, v, scale, query_segments, key_segments, offset, window):
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = [
            j
            for j in range(k.shape[1])
            if j <= i + offset and query_segments[b, i] == key_segments[b, j] and (window is None or j > i + offset - window)
        ]
        scores = np.array([q[b, i, h] @ k[b, j, h // group] * scale for j in seen])
        weights = np.exp(scores - scores.max())
        out[b, i, h] = sum(w * v[b, j, h // group] for w, j in zip(weights / weights.sum(), seen, strict=True))
    return out


@pytest.mark.parametrize("window, chunk, offset", [(3, 1024, 5), (None, 4, 0), (3, 4, 5)])
def test_equals_the_definition(window, chunk, offset, monkeypatch):
    monkeypatch.setattr(module, "QUERY_CHUNK", chunk)
    rng = seeds.rng()
    keys = 11 + offset
    q, k, v = rng.normal(size=(2, 11, 4, 8)), rng.normal(size=(2, keys, 2, 8)), rng.normal(size=(2, keys, 2, 5))
    key_segments = np.sort(rng.integers(1, 4, (2, keys)), axis=1)
    query_segments = key_segments[:, offset:]
    out = whole(attention)(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        scale=0.3,
        query_segment_ids=jnp.asarray(query_segments),
        key_segment_ids=jnp.asarray(key_segments),
        query_offset=offset,
        window=window,
    )
    np.testing.assert_allclose(out, definition(q, k, v, 0.3, query_segments, key_segments, offset, window), atol=2e-6)


@pytest.mark.parametrize("chunk, window", [(1024, None), (4, 3)])
def test_lse_and_all_gradients_are_those_of_the_definition(rng, chunk, window, monkeypatch):
    monkeypatch.setattr(module, "QUERY_CHUNK", chunk)
    q, k = (jnp.asarray(rng.normal(size=(2, 7, heads, 8)), jnp.float32) for heads in (4, 2))
    dout, dlse = rng.normal(size=(2, 7, 4, 8)), rng.normal(size=(2, 4, 7))
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (2, 7)), axis=1))
    distance = jnp.arange(7)[:, None] - jnp.arange(7)
    seen = (ids[:, :, None] == ids[:, None]) & (distance >= 0) & (distance < (window or 7))

    def ours(q, k):
        return attention(q, k, k, scale=0.3, query_segment_ids=ids, key_segment_ids=ids, window=window, return_lse=True)

    def plain(q, k):
        k = jnp.repeat(k, 2, axis=2)
        scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3, -jnp.inf)
        lse = jnp.log(jnp.exp(scores).sum(-1))
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), k), lse

    def with_gradients(f):
        (out, lse), pullback = jax.vjp(lambda *a: tuple(f(*a)), q, k)
        return out, lse, *pullback((jnp.asarray(dout, jnp.float32), jnp.asarray(dlse, jnp.float32)))

    for found, expected in zip(*(jax.jit(with_gradients, static_argnums=0)(f) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_query_without_keys():
    """Value and gradient stay finite."""
    x = jnp.ones((1, 2, 1, 4))
    mine, other = jnp.array([[1, 1]]), jnp.array([[2, 2]])

    def loss(x):
        return attention(x, x, x, scale=1.0, query_segment_ids=mine, key_segment_ids=other).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(gradient).all())


def test_shape_errors():
    q, k = jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 2, 2, 4))
    ids = jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"q \(1, 2, 3, 4\), k \(1, 2, 2, 4\)"):
        attention(q, k, k, scale=1.0, query_segment_ids=ids, key_segment_ids=ids)
    with pytest.raises(ValueError, match=r"key_segment_ids must have shape \[1, 2\], one id per token; got \[1, 1\]"):
        attention(k, k, k, scale=1.0, query_segment_ids=ids, key_segment_ids=ids[:, :1])


@pytest.mark.parametrize("window", [0, np.int64(-3)])
def test_window_below_1(window):
    q, ids = jnp.zeros((1, 2, 1, 4)), jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="window must be at least 1 or None"):
        attention(q, q, q, scale=1.0, query_segment_ids=ids, key_segment_ids=ids, window=window)


def test_traced_window_below_1():
    """It counts as 1: each query sees itself."""
    q = jnp.asarray(seeds.rng().normal(size=(1, 5, 1, 4)), jnp.float32)
    ids = jnp.ones((1, 5), jnp.int32)
    of_window = jax.jit(lambda window: attention(q, q, q, scale=1.0, query_segment_ids=ids, key_segment_ids=ids, window=window))
    np.testing.assert_array_equal(of_window(0), q)


@pytest.mark.parametrize("batch, queries", [(0, 4), (1, 0)])
def test_no_queries(batch, queries):
    """An empty batch or sequence gives an empty result."""
    q, k = jnp.zeros((batch, queries, 2, 4)), jnp.zeros((batch, 4, 1, 4))
    ids = [jnp.ones(x.shape[:2], jnp.int32) for x in (q, k)]
    found = whole(attention)(q, k, k, scale=1.0, query_segment_ids=ids[0], key_segment_ids=ids[1])
    assert found.shape == (batch, queries, 2, 4)


def test_traced_scale_and_dtype(rng):
    """The scale may be traced, and the result has q's dtype, not k's or v's."""
    q, k, v, options = fused_inputs(rng)
    options.pop("scale")
    out = jax.jit(lambda scale: attention(q, k.astype(jnp.float32), v.astype(jnp.float32), scale=scale, **options))(0.3)
    assert out.dtype == jnp.bfloat16
    traced = jax.jit(lambda scale: attention(q, k, v, scale=scale, **options))(0.3)
    # One step of bf16, and a probability's rounding, 2^-9, of values up to 5.
    np.testing.assert_allclose(traced.astype(jnp.float32), out.astype(jnp.float32), rtol=2**-7, atol=1e-2)


def fused_inputs(rng, dtype=jnp.bfloat16, seq=130):
    q, k, v = (jnp.asarray(rng.normal(size=(2, seq, heads, 64)), dtype) for heads in (4, 2, 2))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, seq)), axis=1), jnp.int32)
    return q, k, v, {"scale": 0.125, "query_segment_ids": segments, "key_segment_ids": segments}


def test_fused_equals_xla(rng):
    """The window may be unknown while compiling, as in a scan over layers that differ in it."""
    q, k, v, options = fused_inputs(rng)

    def of(backend):
        f = jax.jit(lambda window: attention(q, k, v, window=window, return_lse=True, backend=backend, **options))
        return f(jnp.int32(40))

    fused, plain = of("mosaic"), of("xla")
    # Two steps of bf16; a step is 1/32 at 4 and above.
    np.testing.assert_allclose(np.asarray(fused.out, np.float32), np.asarray(plain.out, np.float32), rtol=1.6e-2, atol=3e-2)
    np.testing.assert_allclose(fused.lse, plain.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, taken",
    [
        ({}, "fused"),
        ({"window": 7}, "fused"),
        ({"window": jnp.int32(7)}, "fused"),
        ({"query_offset": jnp.int32(0)}, "xla"),
        ({"key_segment_ids": jnp.ones((2, 130), jnp.int32)}, "xla"),
        ({"dtype": jnp.float32}, "xla"),
        ({"environment": "xla"}, "xla"),
        ({"devices": 8}, "xla"),
        ({"device_kind": "NVIDIA A100"}, "xla"),
    ],
)
def test_default_backend(rng, monkeypatch, change, taken):
    """One Hopper GPU takes the kernel by default unless the input, the environment or the device speaks against it."""
    calls, change = [], dict(change)
    num_devices = change.pop("devices", 1)
    monkeypatch.setattr(flash, "flash_attention", lambda q, *args, **options: calls.append(options) or (q, None))
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    if name := change.pop("environment", None):
        monkeypatch.setenv("MOE_JAX_BACKEND", name)
    device = AbstractDevice(device_kind=change.pop("device_kind", "NVIDIA H200"), num_cores=132, platform="gpu")
    q, k, v, options = fused_inputs(rng, change.pop("dtype", jnp.bfloat16))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        jax.eval_shape(lambda q, k, v: attention(q, k, v, **options | change), q, k, v)
    assert len(calls) == (taken == "fused")


def test_backend_errors(rng):
    q, k, v, options = fused_inputs(rng)
    with pytest.raises(ValueError, match="backend 'mosaic' does not support this input: .*same tokens"):
        attention(q, k, v, backend="mosaic", **options | {"query_offset": 3})
    with pytest.raises(ValueError, match="q, k and v must all be bfloat16 or all float16; got float32"):
        attention(*(a.astype(jnp.float32) for a in (q, k, v)), backend="mosaic", **options)
    with pytest.raises(ValueError, match="unknown backend 'cudnn'; choose one of 'mosaic', 'xla'"):
        attention(q, k, v, backend="cudnn", **options)
