"""ExpertParallel refuses invalid settings; capacities are the size of an even routing times the factor."""

import itertools

import numpy as np
import pytest

from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.expert.settings import first_capacity, further_capacity


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"transport": "nccl"}, "transport must be one of 'gather', 'all_to_all', 'pairwise', a Transport or None; got 'nccl'"),
        ({"transport": "ragged"}, "transport 'ragged' is experimental: pass the object RAGGED of moe_jax.experimental.ragged"),
        ({"drop": "random"}, "drop must be 'position', 'probability' or None; got 'random'"),
        ({"capacity_factor": 0}, "capacity_factor must be a number above 0; got 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be a number above 0; got nan"),
        ({"capacity_factor": float("inf")}, "capacity_factor must be a number above 0; got inf"),
        ({"group_size": 2}, "group_size must be at least 1, and only transport 'pairwise' takes it; got 2"),
        ({"group_size": 0, "transport": "pairwise"}, "group_size must be at least 1, .*; got 0"),
        ({"shadow_experts": -1}, "shadow_experts must be at least 0; got -1"),
        ({"flops_per_byte": -1.0}, "flops_per_byte must be a number of at least 0; got -1.0"),
        ({"flops_per_byte": float("nan")}, "flops_per_byte must be a number of at least 0; got nan"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**settings)


@pytest.mark.parametrize("num_experts, k, devices", [(8, 2, 4), (6, 3, 2), (4, 4, 2), (4, 1, 4)])
def test_first_capacity(num_experts, k, devices):
    """The capacity at factor 1 is the share of all sets of k experts that hold one of device 0's experts."""
    tokens = 100_000
    own = range(num_experts // devices)
    sets = list(itertools.combinations(range(num_experts), k))
    share = np.mean([any(expert in own for expert in chosen) for chosen in sets])
    slots, pairs = first_capacity(tokens, k, num_experts, devices, 1.0)
    assert slots == pytest.approx(tokens * share, abs=1) and pairs == tokens * k / devices


def test_qwen3_30b_over_eight_devices():
    """Two thirds of 8192 tokens visit each device: 4.67 rows a token go to the 7 others (docs/parallel_experts.md)."""
    assert 7 * first_capacity(8192, 8, 128, 8, 1.0).tokens / 8192 == pytest.approx(4.67, abs=0.01)
    assert first_capacity(8192, 8, 128, 8, 1.25) == (6835, 10240)
    assert further_capacity(first_capacity(8192, 8, 128, 8, 1.25), 8) == (1280, 10240)


def test_bounds_of_capacity():
    assert first_capacity(64, 8, 128, 8, 0.01) == (64, 512)
    assert first_capacity(5, 8, 128, 8, 1.25) == (5, 40)
    assert first_capacity(8192, 8, 128, 2, 4.0) == (8192, 65536)


def test_more_choices_than_experts():
    assert first_capacity(1000, 5, 4, 2, 1.0) == (1000, 2500)


def test_ragged_is_refused_by_name():
    with pytest.raises(ValueError, match=r"pass the object RAGGED of moe_jax\.experimental\.ragged"):
        ExpertParallel(transport="ragged")


@pytest.mark.parametrize(
    "settings, hops, transport",
    [
        ({"capacity_factor": 4.0}, "copies", "pairwise"),
        ({"capacity_factor": 3.9}, "copies", None),
        ({"capacity_factor": 4.0}, "nccl", None),
        ({"capacity_factor": 4.0, "transport": "gather"}, "copies", "gather"),
    ],
)
def test_copies_into_buffers_for_every_routing_go_by_pairs(settings, hops, transport):
    assert ExpertParallel(**settings).over(4, hops).transport == transport
