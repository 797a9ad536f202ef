"""On Hopper GPUs a ring is one kernel and one hop a step forward, two kernels and two hops a step backward."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.parallel import context_attention


@pytest.mark.parametrize("devices", [1, 4])
def test_llama_3_8b_over_h200s(devices):
    """The keys of the last step and the sums of the first do not travel."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((devices,), ("context",), axis_types=(AxisType.Auto,), abstract_device=device)
    q, kv = (jax.ShapeDtypeStruct((1, devices * 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    split = P(None, "context")

    def local(q, k, v):
        return context_attention(q, k, v, scale=128**-0.5)

    def both(q, k, v, dout):
        out, pullback = jax.vjp(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split), q, k, v)
        return out, pullback(dout)

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(both).trace(q, kv, kv, q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3 * devices
    assert text.count('"stablehlo.collective_permute"') == 3 * (devices - 1)
