"""Hops are copies between the GPUs of one process; a program that makes some is compiled so, and no other."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moe_jax.parallel import ExpertParallel, Parallelism, default_hops
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE


def mesh(platform="gpu", processes=1, **axes):
    """What is asked of a mesh, of devices that are not here."""
    numbers = range(int(np.prod(list(axes.values()))))
    devices = [SimpleNamespace(platform=platform, process_index=i % processes) for i in numbers]
    return SimpleNamespace(shape=axes, axis_names=tuple(axes), devices=np.array(devices).reshape(tuple(axes.values())))


def test_copies_are_made_between_the_gpus_of_one_process():
    assert default_hops(mesh(expert=4)) == "copies"
    assert default_hops(mesh(expert=4, processes=2)) == default_hops(mesh(expert=4, platform="cpu")) == "nccl"


@pytest.mark.parametrize(
    "hops, of, message",
    [
        ("copies", mesh(expert=4, processes=2), "hops='copies' are between the GPUs of one process, and .* of 2 processes"),
        ("copies", mesh(expert=4, platform="cpu"), "the mesh has devices of platform cpu: take hops='nccl'"),
        ("copies", mesh(expert=2, fsdp=2), "the axes expert, fsdp in another order than data, fsdp, expert, context: take"),
        ("peer", mesh(expert=4), "hops='peer' must be one of nccl, copies"),
    ],
)
def test_hops_that_cannot_be_made_are_refused(hops, of, message):
    with pytest.raises(ValueError, match=message):
        Parallelism(of, hops=hops)


@pytest.mark.parametrize("of", [mesh(fsdp=4), mesh(fsdp=2, context=2), mesh(expert=4)], ids=lambda of: " ".join(of.shape))
def test_a_step_with_hops_is_compiled_to_copy(of):
    assert Parallelism(of, hops="copies").compiler_options == COPIES | MANY_AT_ONCE
    assert Parallelism(of).compiler_options == {}


def test_xla_knows_the_options():
    """On every platform it refuses names and values that it does not know."""
    assert jax.jit(lambda x: x + 1, compiler_options=COPIES | MANY_AT_ONCE)(1) == 2


def test_tokens_travel_pairwise_by_copies_where_everything_fits():
    def transport(hops, **settings):
        return Parallelism(mesh(expert=4), ExpertParallel(**settings), hops=hops).expert_parallel.transport

    assert transport("copies", capacity_factor=4) == transport("copies", capacity_factor=5) == "pairwise"
    assert transport("copies", capacity_factor=4, transport="gather") == "gather"
    assert transport("copies", capacity_factor=3) is transport("nccl", capacity_factor=4) is None
