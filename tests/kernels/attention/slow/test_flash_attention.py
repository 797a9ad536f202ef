"""Fused attention equals its definition in f64, gradients too, in the interpreter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels.attention.mosaic.flash import flash_attention
from tests.helpers.expert_layers import relative_error
from tests.kernels.attention.test_flash_attention import H200, visible, with_gradients


def packed(rng, batch, seq, segments):
    """Segment ids of documents packed one after another; the last, 0, is padding."""
    ids = np.sort(rng.integers(0, segments, (batch, seq)), axis=1)
    return jnp.asarray((ids + 1) % segments, jnp.int32)


def definition(q, k, v, scale, segment_ids, window):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.where(visible(segment_ids, window)[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), v), lse


def make(rng, batch, seq, heads, kv_heads, head_dim, value_dim, dtype=jnp.bfloat16):
    """q, k, v and the gradients of out and lse."""
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)
    arrays = [jnp.asarray(rng.normal(size=(batch, seq, *shape)), dtype) for shape in shapes]
    return *arrays, jnp.asarray(rng.normal(size=(batch, heads, seq)), jnp.float32)


@pytest.mark.parametrize(
    "batch, seq, heads, kv_heads, head_dim, value_dim, segments, window, dtype",
    [
        (1, 200, 2, 1, 64, 64, 4, None, "float16"),
        pytest.param(2, 200, 2, 2, 64, 128, 3, 50, "bfloat16", marks=pytest.mark.thorough),
        (1, 256, 1, 1, 128, 128, 1, None, "bfloat16"),
        pytest.param(1, 130, 2, 1, 192, 128, 2, None, "bfloat16", marks=pytest.mark.thorough),
        pytest.param(1, 256, 1, 1, 256, 256, 2, 1, "bfloat16", marks=pytest.mark.thorough),
        pytest.param(1, 1, 2, 1, 64, 64, 1, None, "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_equals_the_definition(rng, batch, seq, heads, kv_heads, head_dim, value_dim, segments, window, dtype):
    """out, lse, dq, dk and dv, against f64."""
    arrays = make(rng, batch, seq, heads, kv_heads, head_dim, value_dim, dtype)
    ids, scale = packed(rng, batch, seq, segments), head_dim**-0.5
    actual = with_gradients(lambda *a: flash_attention(*a, scale=scale, segment_ids=ids, window=window), *arrays)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays]
        expected = with_gradients(lambda *a: definition(*a, scale, ids, window), *exact)
    for name, found, wanted in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert found.shape == wanted.shape, name
        assert found.dtype == (jnp.float32 if name == "lse" else dtype), name
        assert relative_error(found, wanted) < (1e-5 if name == "lse" else 5e-3), name


def test_large_scores(rng):
    """Scores of hundreds overflow in neither pass."""
    q, k, v, dout, dlse = make(rng, 1, 128, 1, 1, 64, 64)
    ids = packed(rng, 1, 128, 2)
    results = with_gradients(lambda *a: flash_attention(*a, scale=100.0, segment_ids=ids), q, k, v, dout, dlse)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in results)
    np.testing.assert_allclose(results[1], definition(q, k, v, 100.0, ids, None)[1], rtol=1e-2)


def test_replicated_keys():
    """Their gradients are summed over the devices of a `shard_map`."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device)

    def loss(q, k, v, ids):
        out, lse = jax.shard_map(
            lambda q, k, v, ids: flash_attention(q, k, v, scale=0.1, segment_ids=ids, window=100),
            mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P("data"),
        )(q, k, v, ids)  # fmt: skip
        return out.astype(jnp.float32).sum() + lse.sum()

    q, kv = (jax.ShapeDtypeStruct((batch, 256, 2, 128), jnp.bfloat16) for batch in (4, 2))
    with jax.sharding.use_abstract_mesh(mesh):
        gradient = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, kv, kv, jax.ShapeDtypeStruct((4, 256), jnp.int32))
    assert len(re.findall(r"\bpsum\w*\[", str(gradient))) == 2
