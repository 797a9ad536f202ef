"""`Parallelism` refuses settings that do not fit its mesh. `eight_devices/test_parallelism.py` trains with it."""

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from moe_jax.parallel import ContextParallel, ExpertParallel, Parallelism, context_attention


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_expert_axis():
    for name in ("experts", "fsdp"):
        with pytest.raises(ValueError, match=f"ExpertParallel.axis_name must be 'expert', .*; got '{name}'"):
            Parallelism(mesh(fsdp=2, expert=4), ExpertParallel(axis_name=name))


def test_context_axis():
    with pytest.raises(ValueError, match="ContextParallel.axis_name must be an axis of the mesh, fsdp, context; got 'ctx'"):
        Parallelism(mesh(fsdp=2, context=4), context=ContextParallel(axis_name="ctx"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"layout": "zig"}, "unknown layout 'zig'; choose one of 'contiguous', 'zigzag', 'striped'"),
        ({"method": "rign"}, "unknown method 'rign'; choose one of 'ring', 'all_gather', 'ulysses'"),
        ({"hops": "copy"}, "unknown hops 'copy'; choose one of 'nccl', 'copies'"),
    ],
)
def test_context_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ContextParallel(**settings)


def test_error_outside_shard_map():
    q = jnp.ones((1, 8, 2, 4))
    for method in ("ring", "all_gather", "ulysses"):
        with pytest.raises(NameError, match="no mesh axis 'context' here; call it inside a jax.shard_map over that axis"):
            context_attention(q, q, q, scale=1.0, parallel=ContextParallel(method=method))


def test_mesh_without_axes():
    whole = Parallelism(mesh(fsdp=2))
    assert whole.expert_parallel is None and whole.context_parallel is None
