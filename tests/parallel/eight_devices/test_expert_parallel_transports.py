"""Every transport over every mesh gives the single device's outputs and gradients under any routing."""

import pytest

from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.expert import TRANSPORTS
from tests.helpers.expert_layer import (
    ROUTINGS,
    arrays,
    assert_equal,
    assert_equals_one_device,
    direction,
    on_a_mesh,
    on_one_device,
    routing,
)
from tests.helpers.meshes import make_mesh


@pytest.mark.parametrize(
    "devices, transport",
    [
        (4, "gather"),
        (4, "all_to_all"),
        # `test_expert_parallel.test_accumulators` compares this one too.
        pytest.param(4, "pairwise", marks=pytest.mark.thorough),
        *(pytest.param(8, transport, marks=pytest.mark.thorough) for transport in TRANSPORTS),
    ],
)
def test_equals_one_device(devices, transport):
    group_size = {4: 1, 8: 4}.get(devices) if transport == "pairwise" else None
    assert_equals_one_device(ExpertParallel(transport=transport, group_size=group_size), make_mesh(expert=devices), ROUTINGS)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["all_to_all", "gather", "pairwise"])
def test_large_buffers_need_no_further_rounds(transport):
    """A capacity_factor of n holds the worst routing, and devices need not agree on a number of rounds."""

    def agrees_on_rounds(run):
        return "pmax" in str(run.trace(arrays(), direction(), routing("even")).jaxpr)

    run = on_a_mesh(ExpertParallel(transport=transport, capacity_factor=4), make_mesh(expert=4))
    assert not agrees_on_rounds(run)
    assert agrees_on_rounds(on_a_mesh(ExpertParallel(transport=transport), make_mesh(expert=4)))
    for name in ROUTINGS:
        results, exchange = run(arrays(), direction(), routing(name))
        assert_equal(results, on_one_device(name))
        assert not exchange.num_dropped.any() and (exchange.num_rounds == 1).all()
