"""Checks of `dispatch` and `combine` that hold for every transport."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.expert import combine, dispatch
from moe_jax.parallel.expert.routes import first_route, owners, queue
from moe_jax.parallel.expert.settings import Capacity
from tests.helpers.meshes import make_mesh

DEVICES, TOKENS, SLOTS, FEATURES = 4, 12, 7, 3


def on_mesh(f, outputs):
    specs = (P("expert"),) * 3
    return jax.jit(jax.shard_map(f, mesh=make_mesh(expert=DEVICES), in_specs=specs, out_specs=(P("expert"),) * outputs))


def inputs(transport, seed=0):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(-1, DEVICES, (DEVICES * TOKENS, 2))
    received = DEVICES * (TOKENS if transport == "gather" else SLOTS)
    x = jnp.asarray(rng.normal(size=(DEVICES * TOKENS, FEATURES)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(DEVICES * received, FEATURES)), jnp.float32)
    return x, rows, jnp.asarray(chosen)


def route_of(chosen):
    capacity = Capacity(SLOTS, 2 * TOKENS)
    return first_route(queue(owners(chosen, DEVICES, DEVICES), jnp.zeros(chosen.shape), DEVICES, capacity), capacity)


def assert_exchanges(transport):
    """Each device receives the tokens that chose its experts, as far as its slots reach.

    dispatch and combine are each other's transpose, and each is the other's gradient.
    """

    def local(x, rows, chosen):
        how = route_of(chosen), "expert", transport
        received, to_dispatch = jax.vjp(lambda x: dispatch(x, *how), x)
        summed, to_combine = jax.vjp(lambda rows: combine(rows, *how), rows)
        return received, summed, to_dispatch(rows)[0], to_combine(x)[0]

    x, rows, chosen = inputs(transport)
    received, summed, d_x, d_rows = on_mesh(local, 4)(x, rows, chosen)
    np.testing.assert_allclose(jnp.vdot(received, rows), jnp.vdot(x, summed), rtol=1e-4)
    np.testing.assert_array_equal(d_x, summed)
    np.testing.assert_array_equal(d_rows, received)
    received = np.asarray(received).reshape(DEVICES, -1, FEATURES)
    for device in range(DEVICES):
        expected = []
        for source in range(DEVICES):
            own = range(source * TOKENS, (source + 1) * TOKENS)
            expected += [t for t in own if (np.asarray(chosen[t]) == device).any()][:SLOTS]
        found = [row for row in received[device] if row.any()]
        wanted = np.asarray(x)[range(DEVICES * TOKENS) if transport == "gather" else expected]
        # Pairwise receives by distance.
        np.testing.assert_array_equal(sorted(map(tuple, found)), sorted(map(tuple, wanted)))


def assert_gpu_collective(transport, collective):
    """A program for GPUs sends tokens by `collective`, not by an all-gather."""
    x, rows, chosen = inputs(transport)
    f = on_mesh(lambda x, rows, chosen: (dispatch(x, route_of(chosen), "expert", transport),), 1)
    text = f.trace(x, rows, chosen).lower(lowering_platforms=("cuda",)).as_text()
    assert collective in text and "all_gather" not in text
