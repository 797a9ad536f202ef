"""Peer-to-peer copies need the GPUs of one process, and a program compiled for them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moe_jax.parallel import ExpertParallel, Parallelism, default_hops
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE


def mesh(platform="gpu", processes=1, **axes):
    """Returns a fake of a mesh of devices that this machine lacks."""
    numbers = range(int(np.prod(list(axes.values()))))
    devices = [SimpleNamespace(platform=platform, process_index=i % processes) for i in numbers]
    return SimpleNamespace(shape=axes, axis_names=tuple(axes), devices=np.array(devices).reshape(tuple(axes.values())))


def test_default_hops():
    assert default_hops(mesh(expert=4)) == "copies"
    assert default_hops(mesh(expert=4, processes=2)) == default_hops(mesh(expert=4, platform="cpu")) == "nccl"


@pytest.mark.parametrize(
    "hops, of, message",
    [
        ("copies", mesh(expert=4, processes=2), "hops='copies' needs all GPUs in one process, but .* of 2 processes"),
        ("copies", mesh(expert=4, platform="cpu"), "the mesh has devices of platform cpu: use hops='nccl'"),
        (
            "copies",
            mesh(expert=2, fsdp=2),
            "the axes expert, fsdp in another order than pipe, data, fsdp, expert, context: use",
        ),
        ("peer", mesh(expert=4), "hops='peer' must be one of nccl, copies"),
    ],
)
def test_errors(hops, of, message):
    with pytest.raises(ValueError, match=message):
        Parallelism(of, hops=hops)


@pytest.mark.parametrize("of", [mesh(fsdp=4), mesh(fsdp=2, context=2), mesh(expert=4)], ids=lambda of: " ".join(of.shape))
def test_compiler_options(of):
    assert Parallelism(of, hops="copies").compiler_options == COPIES | MANY_AT_ONCE
    assert Parallelism(of).compiler_options == {}


def test_xla_knows_the_options():
    """XLA refuses unknown names and values on every platform."""
    assert jax.jit(lambda x: x + 1, compiler_options=COPIES | MANY_AT_ONCE)(1) == 2


def test_default_transport():
    """With peer-to-peer copies and buffers for every routing, tokens travel by "pairwise"."""

    def transport(hops, **settings):
        return Parallelism(mesh(expert=4), ExpertParallel(**settings), hops=hops).expert_parallel.transport

    assert transport("copies", capacity_factor=4) == transport("copies", capacity_factor=5) == "pairwise"
    assert transport("copies", capacity_factor=4, transport="gather") == "gather"
    assert transport("copies", capacity_factor=3) is transport("nccl", capacity_factor=4) is None
