"""The choice of a backend, by the device or by name, and the log line about it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moe_jax.kernels import backends as backend
from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts import mosaic, triton, xla
from moe_jax.kernels.hopper import interpreter

LAYER = (jnp.bfloat16, 128, 64)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    has_triton(monkeypatch, False)
    backend._announce.cache_clear()


def has_triton(monkeypatch, installed):
    for module in (triton, triton.launch):
        monkeypatch.setattr(module, "missing_packages", lambda: None if installed else "jax-triton cannot be imported")


def on(device_kind):
    device = AbstractDevice(device_kind=device_kind, num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def test_names_lead_to_modules():
    assert [implementation(name) for name in backend.BACKENDS] == [mosaic, triton, xla]


def test_hopper_takes_its_kernels_and_other_devices_take_xla(caplog):
    with caplog.at_level("INFO", logger="moe_jax"):
        with on("NVIDIA H200"):
            assert backend.resolve_backend(None, *LAYER) == ("mosaic" if jax.device_count() == 1 else "xla")
        with on("NVIDIA A100"):
            assert [backend.resolve_backend(None, *LAYER) for _ in range(2)] == ["xla", "xla"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "each choice is logged once"
    assert messages[1] == "MoE experts run on backend 'xla'" + "".join(
        f"; {name!r} not: it is not written for this device" for name in ("mosaic", "triton")
    )


@pytest.mark.parametrize("layer", [(jnp.bfloat16, 100, 64), (jnp.bfloat16, 128, 32)])
@pytest.mark.parametrize("installed", [False, True])
def test_hopper_takes_triton_or_xla_where_its_kernels_do_not_fit(monkeypatch, layer, installed):
    has_triton(monkeypatch, installed)
    with on("NVIDIA H100 80GB HBM3"):
        other = "triton" if installed and jax.device_count() == 1 else "xla"
        assert backend.resolve_backend(None, *layer) == other


def test_f32_takes_xla_by_default_and_triton_by_name(monkeypatch):
    has_triton(monkeypatch, True)
    with on("NVIDIA H200"):
        assert backend.resolve_backend(None, jnp.float32, 128, 64) == "xla"
        assert backend.resolve_backend("triton", jnp.float32, 128, 64) == "triton"


def test_a_plan_made_for_xla_is_computed_by_xla():
    with on("NVIDIA H200"):
        assert backend.resolve_backend(None, *LAYER, row_alignment=1) == "xla"


def test_several_devices_take_xla_outside_shard_map(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with on("NVIDIA H200"):
        assert backend.resolve_backend(None, *LAYER) == "xla"
        assert backend.resolve_backend("mosaic", *LAYER) == "mosaic"


@pytest.mark.parametrize("size, taken", [(1, "mosaic"), (2, "xla")])
def test_shard_map_takes_the_kernels_if_all_else_is_whole(monkeypatch, size, taken):
    """The compiler may split along the Auto axis `model`, unless its size is 1."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    types = AxisType.Manual, AxisType.Auto
    mesh = AbstractMesh((4, size), ("expert", "model"), abstract_device=device, axis_types=types)
    with jax.sharding.use_abstract_mesh(mesh):
        assert backend.resolve_backend(None, *LAYER) == taken


@pytest.mark.parametrize("chosen", ["cpu", jax.devices("cpu")[0]])
def test_kernels_are_interpreted_if_a_cpu_is_the_default(monkeypatch, chosen):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_device(chosen):
        assert interpreter.is_interpreted() and backend.compute_capability() is None


def test_a_named_backend_is_taken_or_refused(monkeypatch):
    assert backend.resolve_backend("xla", *LAYER) == "xla"
    with on("NVIDIA A100"), pytest.raises(ValueError, match=r"argument backend: .*'mosaic'.* Hopper GPU .*9\.0"):
        backend.resolve_backend("mosaic", *LAYER)
    with pytest.raises(ValueError, match="argument backend: unknown backend 'cuda'; choose one of 'mosaic', 'triton', 'xla'"):
        backend.resolve_backend("cuda", *LAYER)
    monkeypatch.setenv("MOE_JAX_BACKEND", "typo")
    with pytest.raises(ValueError, match="environment variable MOE_JAX_BACKEND: unknown backend 'typo'"):
        backend.resolve_backend(None, *LAYER)
    assert backend.resolve_backend("xla", *LAYER) == "xla", "the argument outranks the environment"
