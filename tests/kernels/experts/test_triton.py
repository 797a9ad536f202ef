"""The Triton kernels: in Triton's interpreter where there is no GPU, compiled where there is one."""

import functools
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moe_jax import kernels
from moe_jax.kernels import backends as backend
from moe_jax.kernels.experts import triton as ours
from moe_jax.kernels.experts.triton import launch
from tests.helpers.expert_gradients import accumulating
from tests.helpers.triton_without_gpu import needs_triton, pretend_hopper

QWEN3_30B = {"experts": 128, "k": 8, "hidden": 2048, "inter": 768}


def layer_shapes(tokens, experts, k, hidden, inter):
    bf16 = [(tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in bf16]
    return *arrays, *(jax.ShapeDtypeStruct((tokens, k), dtype) for dtype in (jnp.float32, jnp.int32)), arrays[0]


def step_with_totals(totals, *arrays):
    *arrays, dy = arrays
    return jax.vjp(lambda t: accumulating(*arrays, t, backend="triton"), totals)[1](dy)


def step(x, w_gate_up, w_down, weights, chosen, dy, biases=None, **options):
    def layer(*arrays, biases):
        return kernels.experts_mlp(*arrays, chosen, backend="triton", biases=biases, **options)

    y, pullback = jax.vjp(functools.partial(layer, biases=biases), x, w_gate_up, w_down, weights)
    return y, pullback(dy)


@needs_triton
def test_a_triton_that_jax_triton_does_not_know(monkeypatch):
    """The reason names it; calls would fail with an error about a class without members."""
    library = types.SimpleNamespace(triton_lib=types.SimpleNamespace(cb=types.SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "jax_triton", library)
    assert "does not know this version of Triton" in launch.missing_packages.__wrapped__()


@needs_triton
@pytest.mark.parametrize("tokens", [1, 32768])
def test_a_real_layer_lowers_for_an_h200(tokens):
    if launch.missing_packages() is not None:
        pytest.skip(f"needs jax_triton and JAX's CUDA plugin: {launch.missing_packages()}")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert ours.is_native() and backend.resolve_backend("triton", jnp.bfloat16, 2048, 768) == "triton"
        lowered = jax.jit(step).trace(*layer_shapes(tokens, **QWEN3_30B)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @triton_kernel_call") == 6


@needs_triton
def test_accumulators_are_updated_in_place():
    if launch.missing_packages() is not None:
        pytest.skip(f"needs jax_triton and JAX's CUDA plugin: {launch.missing_packages()}")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    shapes = layer_shapes(8192, **QWEN3_30B)
    totals = tuple(jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in shapes[1:3])
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(step_with_totals).trace(totals, *shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 6\b", lowered)) == 2


@pytest.mark.parametrize(
    "capability, dtype, message",
    [
        (None, "bfloat16", "it needs an NVIDIA GPU; this is none"),
        ("gfx942", "bfloat16", "it needs an NVIDIA GPU; this is none"),
        ("7.5", "bfloat16", "it needs an NVIDIA GPU of compute capability 8.0 or above; this has 7.5"),
        ("8.0", "float64", "x is float64; it computes in bfloat16, float16 and float32"),
    ],
)
def test_unsupported_devices_and_dtypes_are_refused_by_reason(monkeypatch, capability, dtype, message):
    pretend_hopper(monkeypatch, capability)
    assert ours.is_native() == (capability == "8.0")
    assert ours.refusal(jnp.dtype(dtype), 64, 64) == message
    assert ours.refusal(jnp.dtype(jnp.bfloat16), 7, 33) == (None if capability == "8.0" else message)


def test_missing_packages_are_refused_with_a_pip_command(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: "8.9")
    monkeypatch.setitem(sys.modules, "triton", None)
    launch.missing_packages.cache_clear()
    try:
        assert not ours.is_native()
        assert ours.refusal(jnp.dtype(jnp.bfloat16), 64, 64).endswith("; pip install jax-triton triton")
    finally:
        launch.missing_packages.cache_clear()


def test_jax_triton_without_jaxs_cuda_plugin_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: "8.9")
    for name in ("triton", "jax_triton", "jaxlib.gpu_triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    launch.missing_packages.cache_clear()
    try:
        assert ours.refusal(jnp.dtype(jnp.bfloat16), 64, 64).endswith("which is not installed; pip install jax[cuda13]")
    finally:
        launch.missing_packages.cache_clear()


def test_importing_the_library_does_not_import_triton():
    command = "import sys, moe_jax.kernels.experts.triton; sys.exit('triton' in sys.modules or 'jax_triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)
