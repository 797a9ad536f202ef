"""Gathers and sums made of `hop` equal JAX's collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.collectives.hops import add_contributions, join_parts, send_contributions, send_part, sum_scatter
from tests.helpers import seeds
from tests.helpers.meshes import make_mesh

AXES = [("fsdp",), ("expert",), ("fsdp", "expert")]


def per_device(f, *arrays):
    """Stacks f of each device's slice of the arrays."""
    mesh = make_mesh(fsdp=2, expert=4)
    both = P(("fsdp", "expert"))
    run = jax.shard_map(lambda *parts: f(*(part[0] for part in parts))[None], mesh=mesh, in_specs=both, out_specs=both)
    return np.asarray(jax.jit(run)(*arrays), np.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh_axes", AXES, ids=" ".join)
def test_gather(mesh_axes, axis):
    parts = jnp.asarray(seeds.rng().normal(size=(8, 2, 3)), jnp.bfloat16)
    found = per_device(lambda part: join_parts(send_part(part, mesh_axes), mesh_axes, axis), parts)
    np.testing.assert_array_equal(
        found, per_device(lambda part: jax.lax.all_gather(part, mesh_axes, axis=axis, tiled=True), parts)
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh_axes", AXES, ids=" ".join)
def test_sum(mesh_axes, axis):
    contributions = jnp.asarray(seeds.rng().normal(size=(8, 16, 24)), jnp.bfloat16)
    found = per_device(lambda x: add_contributions(send_contributions(x, mesh_axes, axis)), contributions)
    expected = per_device(lambda x: sum_scatter(x, mesh_axes, axis), contributions)
    # Only the order of the f32 sum differs.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
