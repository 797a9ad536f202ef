"""dispatch brings the right tokens, combine is its transpose, and ragged_all_to_all's emulation does what XLA documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from moe_jax.parallel.expert import TRANSPORTS, combine, dispatch
from moe_jax.parallel.expert.ragged import emulated_ragged_all_to_all
from moe_jax.parallel.expert.routes import first_route, owners, queue
from moe_jax.parallel.expert.settings import Capacity

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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_is_the_others_transpose(transport):
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_arrive_where_their_experts_live(transport):
    x, rows, chosen = inputs(transport)

    def local(x, rows, chosen):
        return (dispatch(x, route_of(chosen), "expert", transport),)

    received = np.asarray(on_mesh(local, 1)(x, rows, chosen)[0]).reshape(DEVICES, -1, FEATURES)
    for device in range(DEVICES):
        expected = []
        for source in range(DEVICES):
            own = range(source * TOKENS, (source + 1) * TOKENS)
            expected += [t for t in own if (np.asarray(chosen[t]) == device).any()][:SLOTS]
        found = [row for row in received[device] if row.any()]
        wanted = np.asarray(x)[range(DEVICES * TOKENS) if transport == "gather" else expected]
        # Pairwise receives by distance.
        np.testing.assert_array_equal(sorted(map(tuple, found)), sorted(map(tuple, wanted)))


def test_bf16_rows_are_summed_in_f32():
    """1 and three times 2^-8: in bf16 each addition would be lost."""

    def local(rows):
        nobody = jnp.zeros((TOKENS, 1), jnp.int32)
        return combine(rows, route_of(nobody), "expert", "gather")

    rows = jnp.full((DEVICES, DEVICES * TOKENS, FEATURES), 2.0**-8, jnp.bfloat16).at[0].set(1)
    f = jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=P("expert"), out_specs=P("expert"))
    summed = jax.jit(f)(rows.reshape(-1, FEATURES))
    assert summed.dtype == jnp.float32 and (summed == 1 + 3 * 2.0**-8).all()


def test_the_emulated_ragged_all_to_all_moves_runs_of_rows_between_any_offsets():
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 4, (DEVICES, DEVICES))  # [from, to]
    begins = np.cumsum(sizes + 1, axis=1) - sizes  # gaps between the runs
    places = np.cumsum(sizes + 2, axis=0) - sizes
    operand = rng.normal(size=(DEVICES, begins[:, -1].max() + 4, FEATURES)).astype(np.float32)
    output = rng.normal(size=(DEVICES, places[-1].max() + 4, FEATURES)).astype(np.float32)
    expected = output.copy()
    for source, to in np.ndindex(DEVICES, DEVICES):
        run = operand[source, begins[source, to] : begins[source, to] + sizes[source, to]]
        expected[to, places[source, to] : places[source, to] + sizes[source, to]] = run

    def local(*arrays):
        return emulated_ragged_all_to_all(*(a[0] for a in arrays), axis_name="expert")[None]

    f = jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=(P("expert"),) * 6, out_specs=P("expert"))
    arguments = [jnp.asarray(a) for a in (operand, output, begins, sizes, places, sizes.T)]
    np.testing.assert_array_equal(jax.jit(f)(*arguments), expected)


@pytest.mark.parametrize("transport, collective", [("ragged", "ragged_all_to_all"), ("pairwise", "collective_permute")])
def test_on_a_gpu_the_collective_is_the_real_one(transport, collective):
    x, rows, chosen = inputs(transport)
    f = on_mesh(lambda x, rows, chosen: (dispatch(x, route_of(chosen), "expert", transport),), 1)
    text = f.trace(x, rows, chosen).lower(lowering_platforms=("cuda",)).as_text()
    assert collective in text and "all_gather" not in text
