"""Counts a ring's kernels and transfers on Hopper GPUs.

A step is one kernel forward and two backward; over NCCL one transfer overlaps each.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.attend import Expansion
from moe_jax.layers.latent_attention import expand
from moe_jax.layers.linear import TicketedMatrix
from moe_jax.parallel import ContextParallel, context_attention
from moe_jax.parallel.sequence.ring import devices_per_ring_step
from tests.helpers.lowered import num_kernels


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices, hops, steps, travels",
    [
        (1, "nccl", 1, 0),
        # The keys of the last step and the gradients of the first do not travel.
        (4, "nccl", 4, 3 * 3),
        # k, v and their gradients are copies of their own.
        (4, "copies", 2, 3 * 6),
        (8, "copies", 2, 7 * 6),
    ],
)
def test_llama_3_8b_over_h200s(devices, hops, steps, travels):
    q, kv = (jax.ShapeDtypeStruct((1, devices * 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    text = lowered(devices, partial(context_attention, scale=128**-0.5, parallel=ContextParallel(hops=hops)), q, (kv, kv))
    assert num_kernels(text) == 3 * steps
    assert text.count('"stablehlo.collective_permute"') == travels


def test_devices_of_a_step():
    """Keys and values of eight heads of 128 numbers, in bf16; one of NCCL's transfers never serves several steps."""
    of_token = 2 * 8 * 128 * 2
    assert [devices_per_ring_step(tokens * of_token, "copies") for tokens in (8192, 32768, 65536, 2**20)] == [8, 2, 1, 1]
    assert devices_per_ring_step(8192 * of_token, "nccl") == 1


@pytest.mark.thorough
def test_long_sequences_take_one_device_a_step():
    """The keys and values of one device are a quarter of a GiB."""
    q, kv = (jax.ShapeDtypeStruct((1, 3 * 65536, heads, 128), jnp.bfloat16) for heads in (32, 8))
    text = lowered(3, partial(context_attention, scale=128**-0.5, parallel=ContextParallel(hops="copies")), q, (kv, kv))
    assert num_kernels(text) == 3 * 3


LATENTS, GRADIENTS = f"{8192 * 576}xbf16", f"{8192 * 576}xf32"


@pytest.mark.parametrize(
    "method, kernels, travels",
    [
        ("ring", 8, {"collective_permute": [LATENTS] * 2 + [GRADIENTS]}),
        pytest.param(
            "all_gather",
            4,
            {"all_gather": ["1x8192x576xbf16"] * 2, "reduce_scatter": ["1x16384x576xf32"]},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_latents_travel(method, kernels, travels):
    """DeepSeek-V3 sends 576 numbers a token in place of 40960, and sums the gradients of a replicated weight.

    dk and dv are a kernel each.
    """
    config = NAMED_CONFIGS["deepseek-v3"]
    shapes = (1, 16384, 128, 192), (1, 16384, 576), (32768, 512)
    q, latents, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    attend = partial(context_attention, scale=config.mixer.key_dim**-0.5, parallel=ContextParallel(method=method))
    text = lowered(2, attend, q, (latents,), Expansion(partial(expand, config), TicketedMatrix(weight, None)))
    assert num_kernels(text) == kernels
    found = re.findall(r'"stablehlo\.(collective_\w+|all_\w+|reduce_scatter)".*? : \(tensor<(\w+)>\)', text, re.DOTALL)
    expected = travels | {"all_reduce": ["32768x512xbf16"]}
    assert {name: sorted(of for kind, of in found if kind == name) for name, _ in found} == expected


def lowered(devices: int, attend, q, kv, expansion=None) -> str:
    """Returns the program for H200s of `attend` and its gradients. The weights of the expansion are replicated."""
    expand, weights = expansion or (None, ())
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((devices,), ("context",), axis_types=(AxisType.Auto,), abstract_device=device)
    split = P(None, "context")

    def local(q, kv, weights):
        return attend(q, *kv, expansion=expand and Expansion(expand, weights))

    def both(q, kv, weights, dout):
        on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(split, split, P()), out_specs=split)
        out, pullback = jax.vjp(on_mesh, q, kv, weights)
        return out, pullback(dout)

    dout = jax.ShapeDtypeStruct((*q.shape[:3], 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(both).trace(q, kv, weights, dout).lower(lowering_platforms=("cuda",)).as_text()
