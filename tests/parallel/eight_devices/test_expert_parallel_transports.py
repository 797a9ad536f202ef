"""Every transport over every mesh gives the single device's outputs and gradients under any routing."""

import itertools

import numpy as np
import pytest
from expert_layer import ROUTINGS, arrays, assert_equal, direction, on_a_mesh, on_one_device, routing
from meshes import make_mesh

from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.expert import TRANSPORTS


@pytest.mark.parametrize(
    "devices, transport",
    [
        *itertools.product([8], TRANSPORTS),
        (4, "pairwise"),
        *(pytest.param(2, transport, marks=pytest.mark.thorough) for transport in TRANSPORTS),
    ],
)
def test_equals_one_device_under_any_routing_and_itself_bit_for_bit(devices, transport):
    group_size = {4: 1, 8: 4}.get(devices) if transport == "pairwise" else None
    run = on_a_mesh(ExpertParallel(transport=transport, group_size=group_size), make_mesh(expert=devices))
    for name in ROUTINGS:
        results, (dropped, rounds, shadows) = run(arrays(), direction(), routing(name))
        assert_equal(results, on_one_device(name))
        assert not dropped.any() and not shadows.any() and len(set(map(int, rounds))) == 1
        if name == "even":
            assert rounds[0] == 1
        if name == "one expert takes all":
            assert rounds[0] > 1
            for a, b in zip(results, run(arrays(), direction(), routing(name))[0], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("transport", ["gather", "all_to_all", "pairwise"])
def test_buffers_for_the_worst_routing_need_no_further_rounds(transport):
    def agrees_on_rounds(run):
        return "pmax" in str(run.trace(arrays(), direction(), routing("even")).jaxpr)

    run = on_a_mesh(ExpertParallel(transport=transport, capacity_factor=4), make_mesh(expert=4))
    assert not agrees_on_rounds(run)
    assert agrees_on_rounds(on_a_mesh(ExpertParallel(transport=transport), make_mesh(expert=4)))
    for name in ROUTINGS:
        results, (dropped, rounds, _) = run(arrays(), direction(), routing(name))
        assert_equal(results, on_one_device(name))
        assert not dropped.any() and (rounds == 1).all()
