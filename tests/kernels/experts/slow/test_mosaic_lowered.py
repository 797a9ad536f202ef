"""Layers lowered for an H200: how many Hopper kernels they are, and what these write and share. No compiler is needed."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax import kernels
from tests.helpers.expert_gradients import accumulating
from tests.helpers.expert_layers import types_of
from tests.helpers.lowered import launches_on_h200, lowered_for_h200, num_kernels

LAYERS = (128, 8, 2048, 768), (8, 2, 4096, 14336), (64, 6, 2048, 1408)


@pytest.mark.parametrize(
    "tokens, experts, k, hidden, inter",
    [
        (65536, 256, 8, 7168, 2048),
        pytest.param(300, 3, 1, 64, 384, marks=pytest.mark.thorough),
        *(pytest.param(tokens, *layer, marks=pytest.mark.thorough) for tokens in (1, 100, 65536) for layer in LAYERS),
    ],
)
def test_real_layers_lower_for_an_h200(tokens, experts, k, hidden, inter):
    """With jax_enable_x64 too, and with the smallest width."""

    def step(x, w_gate_up, w_down, weights, chosen, dy):
        y, pullback = jax.vjp(lambda *a: kernels.experts_mlp(*a, chosen, backend="mosaic"), x, w_gate_up, w_down, weights)
        return y, pullback(dy)

    types = types_of(tokens, experts, k, hidden, inter)
    with jax.enable_x64(True):
        lowered = lowered_for_h200(step, *types, types[0])
    assert num_kernels(lowered) == 9, "two gathers and four matmuls backward, one and two forward"


def test_h_is_written_for_gradients():
    """A forward pass alone does not write h."""

    def layer(x, w_gate_up, w_down, weights, chosen):
        return kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen, backend="mosaic")

    def gradients(layer):
        return jax.grad(lambda *a: jnp.square(layer(*a).astype(jnp.float32)).sum(), argnums=(0, 1, 2, 3))

    def kernels_that_write_h_and_act(f):
        launches = launches_on_h200(f, *types_of(100, 4, 2, 256, 320))
        written = [{result.aval.shape[1] for result in each.outvars if result.aval.ndim == 2} for each in launches]
        return [sum(columns in each for each in written) for columns in (640, 320)]

    assert kernels_that_write_h_and_act(layer) == [0, 1]
    # In addition to h and act there are the gradient of h and the weighted act.
    assert kernels_that_write_h_and_act(gradients(layer)) == [2, 2]
    assert kernels_that_write_h_and_act(gradients(jax.checkpoint(layer))) == [2, 3]


def test_accumulators_in_place_on_h200():
    """Two devices have accumulators of their own. Neither is copied, since the kernels' results take their memory."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    tokens, experts, k, hidden, inter = 8192, 128, 8, 2048, 768

    def totals_after(totals, x, w_gate_up, w_down, weights, chosen):
        def loss(totals):
            arrays = x, w_gate_up, w_down, weights, chosen
            y = accumulating(*arrays, totals, backend="mosaic")
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(totals)

    f32, bf16, both = jnp.float32, jnp.bfloat16, [(experts, 2 * inter, hidden), (experts, hidden, inter)]
    totals = tuple(jax.ShapeDtypeStruct((2 * experts, *shape[1:]), f32) for shape in both)
    others = [((tokens, hidden), bf16), *((shape, bf16) for shape in both), ((tokens, k), f32), ((tokens, k), jnp.int32)]
    specs = P("data"), P("data"), P(), P(), P("data"), P("data")
    with jax.sharding.use_abstract_mesh(mesh):
        on_mesh = jax.shard_map(totals_after, mesh=mesh, in_specs=specs, out_specs=P("data"))
        traced = jax.jit(on_mesh, donate_argnums=0).trace(totals, *(jax.ShapeDtypeStruct(*other) for other in others))
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    for shape in both:
        array = "x".join(map(str, shape)) + "xf32"
        (call,) = (
            line for line in lowered.splitlines() if "custom_call @mosaic_gpu" in line and line.endswith(f"-> tensor<{array}>")
        )
        assert re.search(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 3\b", call), call[-300:]
    assert lowered.count("tf.aliasing_output") + lowered.count("jax.buffer_donor") == 2


def test_replicated_weights_on_h200():
    """The gradient of a replicated weight is summed over devices."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    shapes = [(256, 128), (4, 256, 128), (4, 128, 128), (256, 2)]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, [jnp.bfloat16] * 3 + [jnp.float32], strict=True)]

    def trace():
        layer = jax.shard_map(
            lambda *a: kernels.experts_mlp(*a, backend="mosaic"),
            mesh=mesh, in_specs=specs, out_specs=P("data"),
        )  # fmt: skip
        gradient = jax.grad(lambda *a: layer(*a).astype(jnp.float32).sum(), argnums=(1, 2))
        return str(jax.make_jaxpr(gradient)(*arrays, jax.ShapeDtypeStruct((256, 2), jnp.int32)))

    with jax.sharding.use_abstract_mesh(mesh):
        assert len(re.findall(r"\bpsum\w*\[", trace())) == 2
