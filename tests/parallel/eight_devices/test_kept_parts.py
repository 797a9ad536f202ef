"""On meshes too, recomputed layers that keep parts of their residuals have the bits of layers that keep none."""

import jax
import numpy as np
import pytest

from moe_jax.models.remat import KEPT_PARTS
from moe_jax.parallel import ContextParallel, ExpertParallel, Parallelism
from tests.helpers import seeds
from tests.helpers.meshes import make_mesh
from tests.helpers.train_steps import make_batch, train


@pytest.mark.parametrize(
    "sizes, transport, method, micro_batches",
    [
        pytest.param({"fsdp": 2, "expert": 2, "context": 2}, "all_to_all", "ring", 1, marks=pytest.mark.thorough),
        ({"expert": 2, "context": 2}, "pairwise", "ring", 1),
        # Two micro-batches overlap.
        pytest.param({"expert": 4, "context": 2}, "pairwise", "ring", 2, marks=pytest.mark.thorough),
        pytest.param({"data": 2, "fsdp": 2, "context": 2}, None, "all_gather", 1, marks=pytest.mark.thorough),
    ],
)
def test_equals_recomputing_all(sizes, transport, method, micro_batches):
    experts = ExpertParallel(transport=transport, capacity_factor=4)
    parallelism = Parallelism(make_mesh(**sizes), experts, ContextParallel(method=method))
    batch = make_batch(seeds.rng())

    def run(remat):
        return train(batch, parallelism, remat=remat, gradient_accumulation=micro_batches)

    jax.tree.map(np.testing.assert_array_equal, run(",".join(KEPT_PARTS)), run(True))
