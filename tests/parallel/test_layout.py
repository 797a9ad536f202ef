"""Each parameter is split along the axis that the table names, if the mesh allows it."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, SingleDeviceSharding

from moe_jax.parallel import make_mesh, parameter_sharding
from moe_jax.parallel.layout import data_axis, gathered_axes, optimizer_spec, parameter_spec


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


LAYER = ("stages", 0)


@pytest.mark.parametrize(
    "path, shape, expected",
    [
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 64, 32), (None, ("fsdp", "expert"), None)),
        ((*LAYER, "self_attn", "o_proj", "weight"), (3, 32, 64), (None, ("fsdp", "expert"), None)),
        ((*LAYER, "self_attn", "q_a_proj", "weight"), (3, 64, 32), (None, ("fsdp", "expert"), None)),
        ((*LAYER, "self_attn", "kv_a_proj_with_mqa", "weight"), (3, 36, 32), (None, "fsdp", "expert")),
        ((*LAYER, "self_attn", "kv_a_layernorm", "weight"), (3, 32), (None, None)),
        ((*LAYER, "self_attn", "q_proj", "bias"), (3, 64), (None, None)),
        ((*LAYER, "mlp", "experts", "gate_up_proj"), (3, 8, 48, 32), (None, ("expert", "fsdp"), None, None)),
        ((*LAYER, "mlp", "experts", "down_proj"), (3, 6, 32, 24), (None, "expert", "fsdp", None)),
        ((*LAYER, "mlp", "experts", "down_proj"), (3, 5, 32, 24), (None, None, "fsdp", None)),
        ((*LAYER, "mlp", "down_proj", "weight"), (3, 32, 48), (None, ("fsdp", "expert"), None)),
        ((*LAYER, "mlp", "router", "weight"), (3, 8, 32), (None, None, None)),
        ((*LAYER, "mlp", "router", "expert_bias"), (3, 8), (None, None)),
        ((*LAYER, "mlp", "shared_experts", "down_proj", "weight"), (3, 32, 48), (None, ("fsdp", "expert"), None)),
        ((*LAYER, "mlp", "shared_expert_gate", "weight"), (3, 1, 32), (None, None, None)),
        (("embed_tokens", "weight"), (97, 32), (None, ("fsdp", "expert"))),
        (("embed_tokens", "weight"), (97, 33), (None, None)),
        (("lm_head", "weight"), (96, 32), (("fsdp", "expert"), None)),
        (("lm_head", "weight"), (4, 32), ("fsdp", "expert")),
        (("norm", "weight"), (32,), (None,)),
    ],
)
def test_the_table(path, shape, expected):
    assert parameter_spec(path, shape, mesh(fsdp=4, expert=2)) == PartitionSpec(*expected)


def test_mesh_axes():
    path, shape = (*LAYER, "mlp", "experts", "gate_up_proj"), (3, 8, 48, 32)
    assert parameter_spec(path, shape, mesh(data=2, expert=2, context=2))[1] == ("expert", "context")


@pytest.mark.parametrize(
    "path, shape, expected",
    [
        ((*LAYER, "self_attn", "q_proj", "weight"), (4, 64, 32), ("data", "fsdp", None)),
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 64, 32), (None, ("fsdp", "data"), None)),
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 6, 32), (None, "fsdp", "data")),
        ((*LAYER, "mlp", "experts", "gate_up_proj"), (3, 8, 48, 32), (None, ("fsdp", "data"), None, None)),
        ((*LAYER, "mlp", "router", "weight"), (3, 8, 32), (None, "data", None)),
        (("norm", "weight"), (32,), ("data",)),
        (("norm", "weight"), (33,), (None,)),
    ],
)
def test_optimizer_spec(path, shape, expected):
    on = mesh(data=4, fsdp=2)
    assert optimizer_spec(path, shape, on) == PartitionSpec(*expected)
    assert optimizer_spec(path, shape, mesh(fsdp=2)) == parameter_spec(path, shape, mesh(fsdp=2))
    axes = [axis for axis, names in enumerate(expected) if names and "data" in names]
    assert data_axis(path, shape, on) == (axes[0] if axes else None)


@pytest.mark.parametrize(
    "path, shape, expected",
    [
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 2, 4, 64, 32), (None, "pipe", None, ("fsdp", "expert"), None)),
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 2, 4, 36, 32), (None, "pipe", None, "fsdp", "expert")),
        ((*LAYER, "self_attn", "q_proj", "bias"), (3, 2, 4, 64), (None, "pipe", None, None)),
        ((*LAYER, "self_attn", "q_norm", "weight"), (3, 2, 4, 16), (None, "pipe", None, None)),
        ((*LAYER, "input_layernorm", "weight"), (1, 2, 1, 32), (None, "pipe", None, None)),
        (
            (*LAYER, "mlp", "experts", "gate_up_proj"),
            (3, 2, 4, 8, 48, 32),
            (None, "pipe", None, ("expert", "fsdp"), None, None),
        ),
        ((*LAYER, "mlp", "experts", "down_proj"), (3, 2, 4, 6, 32, 24), (None, "pipe", None, "expert", "fsdp", None)),
        ((*LAYER, "mlp", "router", "weight"), (3, 2, 4, 8, 32), (None, "pipe", None, None, None)),
        ((*LAYER, "mlp", "router", "expert_bias"), (3, 2, 4, 8), (None, "pipe", None, None)),
        # Stages outside the pipe have one axis of layers.
        ((*LAYER, "self_attn", "q_proj", "weight"), (3, 64, 32), (None, ("pipe", "fsdp", "expert"), None)),
        ((*LAYER, "mlp", "experts", "down_proj"), (3, 8, 32, 24), (None, ("expert", "pipe"), "fsdp", None)),
        ((*LAYER, "mlp", "router", "weight"), (2, 8, 32), (None, None, None)),
        ((*LAYER, "input_layernorm", "weight"), (2, 32), (None, None)),
        (("embed_tokens", "weight"), (97, 32), (None, ("pipe", "fsdp", "expert"))),
        (("lm_head", "weight"), (8, 32), (("pipe", "fsdp"), "expert")),
        (("norm", "weight"), (32,), (None,)),
    ],
)
def test_a_pipe_splits_chunks_by_rank_and_other_matrices(path, shape, expected):
    assert parameter_spec(path, shape, mesh(pipe=2, fsdp=4, expert=2)) == PartitionSpec(*expected)


def test_layers_stay_on_their_rank_of_the_pipe():
    on = mesh(pipe=2, data=2, fsdp=2)
    path, shape = (*LAYER, "self_attn", "q_proj", "weight"), (3, 2, 4, 64, 32)
    assert optimizer_spec(path, shape, on) == PartitionSpec(None, "pipe", "data", "fsdp", None)


def test_gathered_axes():
    on = mesh(fsdp=4, expert=2)
    assert gathered_axes((*LAYER, "self_attn", "q_proj", "weight"), (3, 64, 32), on) == ((-2, ("fsdp", "expert")),)
    assert gathered_axes((*LAYER, "mlp", "experts", "down_proj"), (3, 8, 32, 24), on) == ((-3, ("fsdp",)),)
    assert gathered_axes((*LAYER, "mlp", "experts", "down_proj"), (3, 6, 32, 24), on) == ((-2, ("fsdp",)),)
    assert gathered_axes((*LAYER, "mlp", "router", "weight"), (3, 8, 32), on) == ()


def test_mesh_without_axes():
    path = ("stages", 0, "mlp", "experts", "gate_up_proj")
    assert parameter_spec(path, (3, 8, 48, 32), mesh(data=2)) == PartitionSpec(None, None, None, None)


def test_no_mesh():
    assert isinstance(parameter_sharding(("norm", "weight"), (32,), None), SingleDeviceSharding)


def test_explicit_axes_are_refused():
    explicit = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"axes fsdp must all be AxisType.Auto, as moe_jax.parallel.make_mesh makes them"):
        parameter_sharding(("norm", "weight"), (32,), explicit)


def test_a_mesh_must_use_every_device():
    with pytest.raises(ValueError, match="pipe=1 x data=3 x fsdp=1 x expert=1 x context=1 has 3 places; there are 1 devices"):
        make_mesh(data=3, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    "processes, advice",
    [
        (1, "set JAX_NUM_CPU_DEVICES=6 before"),
        (2, "start moe-jax launch with --processes 2 --cpu-devices 3"),
        (4, "use a mesh that 4 processes can share"),
    ],
)
def test_the_advice_for_cpus_fits_a_job_of_several_processes(processes, advice, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(ValueError, match=advice):
        make_mesh(data=6, devices=jax.devices()[:1])
