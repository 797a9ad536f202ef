"""`experimental.ragged.RAGGED` passes the checks of the built-in transports, and its emulation does what XLA documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.experimental.ragged import RAGGED, emulated_ragged_all_to_all
from moe_jax.parallel import ExpertParallel
from tests.helpers.exchange_cases import DEVICES, FEATURES, assert_exchanges, assert_gpu_collective
from tests.helpers.expert_layer import ROUTINGS, assert_equals_one_device
from tests.helpers.meshes import make_mesh


def test_tokens_arrive_and_return():
    assert_exchanges(RAGGED)


def test_gpu_collective():
    assert_gpu_collective(RAGGED, "ragged_all_to_all")


@pytest.mark.thorough
def test_equals_one_device():
    assert_equals_one_device(ExpertParallel(transport=RAGGED), make_mesh(expert=8), ROUTINGS)


def test_emulation():
    """Runs of rows move between any offsets; other rows of the output stay."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 4, (DEVICES, DEVICES))  # [from, to]
    begins = np.cumsum(sizes + 1, axis=1) - sizes  # gaps between the runs
    offsets = np.cumsum(sizes + 2, axis=0) - sizes
    operand = rng.normal(size=(DEVICES, begins[:, -1].max() + 4, FEATURES)).astype(np.float32)
    output = rng.normal(size=(DEVICES, offsets[-1].max() + 4, FEATURES)).astype(np.float32)
    expected = output.copy()
    for source, to in np.ndindex(DEVICES, DEVICES):
        run = operand[source, begins[source, to] : begins[source, to] + sizes[source, to]]
        expected[to, offsets[source, to] : offsets[source, to] + sizes[source, to]] = run

    def local(*arrays):
        return emulated_ragged_all_to_all(*(a[0] for a in arrays), axis_name="expert")[None]

    f = jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=(P("expert"),) * 6, out_specs=P("expert"))
    arguments = [jnp.asarray(a) for a in (operand, output, begins, sizes, offsets, sizes.T)]
    np.testing.assert_array_equal(jax.jit(f)(*arguments), expected)
