"""Inside shard_map each Hopper GPU runs the Hopper kernels on its experts, in the first and in further rounds."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import Precision, quantise_matrices
from moe_jax.parallel import ExpertParallel, expert_parallel_mlp
from tests.helpers.lowered import num_kernels

DEVICES, K = 4, 8

PAIRWISE = [1, 3]
"""The number of devices whose tokens each step computes: the device itself, then the other three. Each is summed apart."""

QWEN3_30B = dict(tokens=8192, hidden=2048, inter=768, experts=128)
DEEPSEEK_V3 = dict(tokens=4096, hidden=7168, inter=2048, experts=256)
"""Numbers of tokens are for each device."""


@pytest.mark.parametrize(
    "transport, steps, gathers, permutes, check_vma",
    [
        pytest.param(None, [1], 2, 0, True, marks=pytest.mark.thorough),
        pytest.param(None, [1], 2, 0, False, marks=pytest.mark.thorough),
        pytest.param("pairwise", PAIRWISE, 0, 9, False, marks=pytest.mark.thorough),
        pytest.param("pairwise", PAIRWISE, 0, 9, True, marks=pytest.mark.thorough),
    ],
)
def test_forward(transport, steps, gathers, permutes, check_vma):
    """The default is a gather: with 8 choices on four devices no transport sends less. Outputs return."""
    text = lowered(forward(ExpertParallel(transport=transport)), check_vma, **QWEN3_30B)
    # Each step of the first round and the further rounds have two matmuls and the sums. The first matmul gathers rows.
    assert num_kernels(text) == sum(2 + devices for devices in [*steps, 1])
    assert text.count('"stablehlo.all_gather"') == gathers
    assert text.count('"stablehlo.collective_permute"') == permutes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "transport, steps, sizes, check_vma",
    [
        pytest.param("all_to_all", [1], DEEPSEEK_V3, True, marks=pytest.mark.thorough),
        ("pairwise", PAIRWISE, QWEN3_30B, True),
        pytest.param("pairwise", PAIRWISE, QWEN3_30B, False, marks=pytest.mark.thorough),
    ],
)
def test_gradients(transport, steps, sizes, check_vma):
    layer = forward(ExpertParallel(transport=transport))

    def step(*arguments):
        y, pullback = jax.vjp(lambda *a: layer(*a, arguments[4]), *arguments[:4])
        return y, *pullback(y)

    # Before a backward pass, rows are gathered by a separate kernel: the backward pass needs them too.
    alone, forward_kernels, backward_kernels, products = 2, 3, 4, 2
    # Further rounds recompute the residuals of their backward pass; one kernel sums the weights' gradients over all steps.
    first = sum(forward_kernels + backward_kernels + 2 * devices for devices in steps) + products
    # JAX 0.11 recomputes the second matmul and the sums too, which nothing reads.
    recomputed = forward_kernels + 1 if jax.__version_info__ < (0, 12) else forward_kernels - 1
    further = (alone + 1) + recomputed + backward_kernels + 1 + products
    assert num_kernels(lowered(step, check_vma, **sizes)) == first + further


@pytest.mark.thorough
def test_shadows():
    """Shadows take two more kernels, and travel in one of several branches."""
    text = lowered(forward(ExpertParallel(shadow_experts=2)), True, **QWEN3_30B)
    assert num_kernels(text) == 2 * 3 + 2
    # In addition to tokens, choices and load: one shadow, or two.
    assert text.count('"stablehlo.all_gather"') == 2 + 1 + 2


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
def test_tokens_in_fp8(transport):
    """Tokens travel as bytes, and are gathered by one kernel in place of another, in the first and in further rounds."""
    text = lowered(forward(ExpertParallel(transport=transport, tokens_in_fp8=True), Precision()), True, **QWEN3_30B)
    # Tokens in bf16 have as many kernels.
    assert num_kernels(text) == 2 * 4
    collective = "all_gather" if transport == "gather" else "all_to_all"
    travelling = rf'stablehlo.{collective}".*-> tensor<(?:\d+x)+(2048xbf16|2112xui8)>'
    # Outputs come home by an all-to-all.
    assert set(re.findall(travelling, text)) == ({"2112xui8"} if transport == "gather" else {"2112xui8", "2048xbf16"})


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_frozen_stack(form):
    """Kernels read a layer inside each device's stack: no layer is cut out of it."""
    precision = Precision() if form == "fp8" else None

    def of_layer(x, w_gate_up, w_down, weights, ids):
        # A device's 32 experts, as four layers of eight.
        stacks = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (w_gate_up, w_down))
        return expert_parallel_mlp(x, *stacks, weights, ids, ExpertParallel(), layer=ids[0, 0], precision=precision)[0]

    text = lowered(of_layer, False, **QWEN3_30B, form=form)
    assert num_kernels(text) == 2 * (3 + (form == "fp8"))
    assert not re.search(r"slice.*-> tensor<(?:\d+x)*(?:1536x2048|2048x768)x(?:bf16|f8)", text)


def forward(settings, precision=None):
    return lambda *arguments: expert_parallel_mlp(*arguments, settings, precision=precision)[0]


def lowered(f, check_vma, *, tokens, hidden, inter, experts, form="bf16"):
    """Returns the program of f on each device's part of a layer's arguments, over four H200s."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((DEVICES,), ("expert",), axis_types=(AxisType.Auto,), abstract_device=device)
    bf16 = [(DEVICES * tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in bf16]
    if form == "fp8":
        arrays[1:] = [jax.eval_shape(quantise_matrices, array) for array in arrays[1:]]
    arrays += [jax.ShapeDtypeStruct((DEVICES * tokens, K), dtype) for dtype in (jnp.float32, jnp.int32)]
    with jax.sharding.use_abstract_mesh(mesh):
        on_mesh = jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma)
        return jax.jit(on_mesh).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
