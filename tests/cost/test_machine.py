"""Seconds of collectives: nothing for one device, the link's rate for large arrays, the network's across hosts."""

from dataclasses import replace

import pytest

from moe_jax.cost.machine import (
    H200,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_hop_seconds,
)
from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.choices import MeshShape

COLLECTIVES = [all_gather_seconds, all_reduce_seconds, all_to_all_seconds, reduce_scatter_seconds, ring_hop_seconds]
AT_ONCE = replace(H200, latency=0.0, host_latency=0.0)
GB = 1e9


@pytest.mark.parametrize("seconds", COLLECTIVES)
def test_an_axis_of_one_device_takes_no_time(seconds):
    assert seconds(H200, GB, ("fsdp",), MeshShape(data=8)) == 0


def test_inside_a_host_a_device_receives_all_but_its_own_part():
    mesh = MeshShape(fsdp=4)
    assert all_gather_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(0.75 * GB / H200.all_gather)
    assert all_to_all_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(0.75 * GB / H200.all_to_all)
    assert ring_hop_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(GB / H200.ring_hop)


def test_a_hop_that_is_copied_is_faster_inside_a_host_alone():
    inside, across = MeshShape(fsdp=4), MeshShape(fsdp=16)
    assert ring_hop_seconds(AT_ONCE, GB, ("fsdp",), inside, copied=True) == pytest.approx(GB / H200.ring_hop_copied)
    hops = (ring_hop_seconds(AT_ONCE, GB, ("fsdp",), across, copied=copied) for copied in (True, False))
    assert list(hops) == pytest.approx([GB / H200.between_hosts] * 2)


def test_the_rate_of_experts_averages_nine_equal_matmuls():
    """Gate, up and down have one matmul forward and two backward each. The matmul of d_act is another kernel."""
    times = [1 / H200.experts_matmul] * 8 + [1 / H200.experts_d_act]
    assert ExpertParallel.flops_per_byte == pytest.approx(9 / sum(times) / H200.all_to_all)


def test_between_hosts_the_network_is_the_limit():
    mesh = MeshShape(fsdp=16)
    # In a gather a host's eight GPUs receive the other half together, and NVLink then brings it to each of them. In an
    # all-to-all each GPU exchanges half of its own part.
    assert all_gather_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(15 / 16 * GB / H200.all_gather)
    slow = replace(AT_ONCE, between_hosts=10e9)
    assert all_gather_seconds(slow, GB, ("fsdp",), mesh) == pytest.approx(GB / 2 / 8 / 10e9)
    assert all_to_all_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(GB / 2 / H200.between_hosts)
    assert ring_hop_seconds(AT_ONCE, GB, ("fsdp",), mesh) == pytest.approx(GB / H200.between_hosts)
    assert all_gather_seconds(H200, 0, ("fsdp",), mesh) == H200.latency + H200.host_latency


def test_the_last_axes_of_the_mesh_share_a_host():
    inside, across = MeshShape(fsdp=8, expert=8), MeshShape(fsdp=8, context=8)
    for seconds in COLLECTIVES:
        of_experts, of_fsdp = (seconds(AT_ONCE, GB, (axis,), inside) for axis in ("expert", "fsdp"))
        assert of_experts < of_fsdp
        assert seconds(AT_ONCE, GB, ("context",), across) == of_experts
    # Alone in its host, a GPU receives all of a gather over its own card.
    assert all_gather_seconds(AT_ONCE, GB, ("fsdp",), inside) == pytest.approx(7 / 8 * GB / H200.between_hosts)
    slow = replace(AT_ONCE, between_hosts=10e9)
    assert all_gather_seconds(slow, GB, ("fsdp", "expert"), inside) == pytest.approx(7 / 8 * GB / 8 / 10e9)
