"""Gathers and sums made of `hop` equal JAX's collectives, over one mesh axis and over two, along each axis of the array."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.collectives.hops import add_contributions, join_parts, send_contributions, send_part, sum_scatter
from tests.helpers import seeds
from tests.helpers.meshes import make_mesh

PLACES = list(product([("fsdp",), ("expert",), ("fsdp", "expert")], [0, 1]))
"""(mesh axes, axis of the array)."""


def per_device(f, array):
    """Returns f(each device's part, mesh axes, axis) for all places, stacked over the devices."""
    mesh, both = make_mesh(fsdp=2, expert=4), P(("fsdp", "expert"))
    run = jax.shard_map(lambda part: [f(part[0], *place)[None] for place in PLACES], mesh=mesh, in_specs=both, out_specs=both)
    return [np.asarray(found, np.float32) for found in jax.jit(run)(array)]


def test_gather():
    parts = jnp.asarray(seeds.rng().normal(size=(8, 2, 3)), jnp.bfloat16)
    found = per_device(lambda part, axes, axis: join_parts(send_part(part, axes), axes, axis), parts)
    expected = per_device(lambda part, axes, axis: jax.lax.all_gather(part, axes, axis=axis, tiled=True), parts)
    for place, ours, theirs in zip(PLACES, found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=str(place))


def test_sum():
    contributions = jnp.asarray(seeds.rng().normal(size=(8, 16, 24)), jnp.bfloat16)
    found = per_device(lambda x, *place: add_contributions(send_contributions(x, *place)), contributions)
    for place, ours, theirs in zip(PLACES, found, per_device(sum_scatter, contributions), strict=True):
        # Only the order of the f32 sum differs.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(place))
