"""A mesh and what it is for fit together, or are refused. `eight_devices/test_parallelism.py` trains with them."""

import pytest
from jax.sharding import AbstractMesh, AxisType

from moe_jax.parallel import ContextParallel, ExpertParallel, Parallelism


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_tokens_travel_along_the_axis_that_splits_the_experts():
    for name in ("experts", "fsdp"):
        with pytest.raises(ValueError, match=f"ExpertParallel.axis_name must be 'expert', .*; got '{name}'"):
            Parallelism(mesh(fsdp=2, expert=4), ExpertParallel(axis_name=name))


def test_sequences_are_split_over_an_axis_of_the_mesh():
    with pytest.raises(ValueError, match="ContextParallel.axis_name must be an axis of the mesh, fsdp, context; got 'ctx'"):
        Parallelism(mesh(fsdp=2, context=4), context=ContextParallel(axis_name="ctx"))


def test_a_mesh_needs_no_axis_for_what_it_does_not_split():
    whole = Parallelism(mesh(fsdp=2))
    assert whole.expert_parallel is None and whole.context_parallel is None
