"""On Hopper GPUs a ring is one kernel a turn forward, two backward; over NCCL with one hop beside each; what travels."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from lowered import num_kernels

from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.latent_attention import expand
from moe_jax.parallel import context_attention


@pytest.mark.parametrize(
    "devices, hops, turns, travels",
    [
        (1, "nccl", 1, 0),
        # The keys of the last turn and the sums of the first do not travel.
        (4, "nccl", 4, 3 * 3),
        # k, v and the sums for them are hops of their own.
        (4, "copies", 2, 3 * 6),
        (8, "copies", 2, 7 * 6),
    ],
)
def test_llama_3_8b_over_h200s(devices, hops, turns, travels):
    q, kv = (jax.ShapeDtypeStruct((1, devices * 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    text = lowered(devices, partial(context_attention, scale=128**-0.5, hops=hops), q, (kv, kv), ())
    assert num_kernels(text) == 3 * turns
    assert text.count('"stablehlo.collective_permute"') == travels


def test_a_turn_of_a_long_sequence_is_one_device():
    """Whose keys and values are a quarter of a GiB."""
    q, kv = (jax.ShapeDtypeStruct((1, 4 * 65536, heads, 128), jnp.bfloat16) for heads in (32, 8))
    text = lowered(4, partial(context_attention, scale=128**-0.5, hops="copies"), q, (kv, kv), ())
    assert num_kernels(text) == 3 * 4


LATENTS, GRADIENTS = f"{8192 * 576}xbf16", f"{8192 * 576}xf32"


@pytest.mark.parametrize(
    "method, kernels, travels",
    [
        ("ring", 8, {"collective_permute": [LATENTS] * 2 + [GRADIENTS]}),
        ("all_gather", 4, {"all_gather": ["1x8192x576xbf16"] * 2, "reduce_scatter": ["1x16384x576xf32"]}),
    ],
)
def test_of_deepseek_v3_latents_travel(method, kernels, travels):
    """576 numbers of a token in place of 40960, and the sum of a replicated weight's gradients. dk and dv are a kernel each."""
    config = NAMED_CONFIGS["deepseek-v3"]
    shapes = (1, 16384, 128, 192), (1, 16384, 576), (32768, 512)
    q, latents, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    attend = partial(context_attention, expand=partial(expand, config), scale=config.key_dim**-0.5, method=method)
    text = lowered(2, attend, q, (latents,), weight)
    assert num_kernels(text) == kernels
    found = re.findall(r'"stablehlo\.(collective_\w+|all_\w+|reduce_scatter)".*? : \(tensor<(\w+)>\)', text, re.DOTALL)
    expected = travels | {"all_reduce": ["32768x512xbf16"]}
    assert {name: sorted(of for kind, of in found if kind == name) for name, _ in found} == expected


def lowered(devices: int, attend, q, kept, weights) -> str:
    """The program for H200s of `attend` and its gradients, the sequence split over the devices and the weights on all."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((devices,), ("context",), axis_types=(AxisType.Auto,), abstract_device=device)
    split = P(None, "context")

    def local(q, kept, weights):
        return attend(q, *kept, weights=weights)

    def both(q, kept, weights, dout):
        on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(split, split, P()), out_specs=split)
        out, pullback = jax.vjp(on_mesh, q, kept, weights)
        return out, pullback(dout)

    dout = jax.ShapeDtypeStruct((*q.shape[:3], 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(both).trace(q, kept, weights, dout).lower(lowering_platforms=("cuda",)).as_text()
