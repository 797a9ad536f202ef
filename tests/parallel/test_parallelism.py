"""`Parallelism` refuses settings that do not fit its mesh. `eight_devices/test_parallelism.py` trains with it."""

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

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


def test_rows_are_not_split_over_the_pipe():
    piped, whole = (Parallelism(mesh(pipe=ranks, data=2, fsdp=2, context=2)) for ranks in (2, 1))
    assert piped.row_axes == whole.row_axes == ("data", "fsdp")
    assert piped.batch_spec == PartitionSpec(("data", "fsdp"), "context")
    assert piped.pipelined and not whole.pipelined
    piped.check_batch(4)
    with pytest.raises(ValueError, match="of 2 rows cannot be divided among data=2 x fsdp=2; it must be a multiple of 4"):
        piped.check_batch(2)


def test_sums_run_over_the_pipe_where_there_is_one():
    assert Parallelism(mesh(pipe=2, fsdp=2, context=2)).token_axes == ("pipe", "fsdp", "context")
    assert Parallelism(mesh(pipe=1, fsdp=2, context=2)).token_axes == ("fsdp", "context")


@pytest.mark.parametrize("sizes, chunks", [({"fsdp": 2}, 2), ({"pipe": 1, "fsdp": 2}, 2), ({"pipe": 2}, 0), ({"pipe": 1}, 0)])
def test_pipe_chunks(sizes, chunks):
    got = f"got {chunks} with pipe={sizes.get('pipe', 1)}"
    with pytest.raises(ValueError, match=f"pipe_chunks must be at least 1, and 1 where the mesh axis pipe has one .*; {got}"):
        Parallelism(mesh(**sizes), pipe_chunks=chunks)
    assert Parallelism(mesh(pipe=2), pipe_chunks=2).pipe_chunks == 2


def test_mesh_without_axes():
    whole = Parallelism(mesh(fsdp=2))
    assert whole.expert_parallel is None and whole.context_parallel is None
