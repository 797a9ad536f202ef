"""A model with experts split over the mesh has the losses, gradients and statistics of a single device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.layers.moe import MoE
from moe_jax.layers.router import load_balancing_loss, router_z_loss
from moe_jax.parallel import ExpertParallel, Spread
from tests.helpers import seeds, tiny
from tests.helpers.meshes import make_mesh, relative_error

AXES = ("data", "expert")


def projected(parameters, graph, tokens, segment_ids, direction, **options):
    """Returns a projection of the logits, and the model's statistics."""
    model = nnx.merge(graph, parameters)
    states = model.hidden_states(tokens, segment_ids=segment_ids, **options)
    return jnp.sum(states.hidden @ model.head_weight.T * direction), states.router


def total(of_logits, statistics):
    return of_logits + load_balancing_loss(statistics) + router_z_loss(statistics)


SETTINGS = {
    "exchange": ExpertParallel(transport="all_to_all"),
    "shadows that cost nothing": ExpertParallel(transport="all_to_all", shadow_experts=2, flops_per_byte=0),
}


# `test_parallelism.test_two_steps` trains such a model, and `test_expert_parallel_transports` has this exchange.
@pytest.mark.thorough
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_equals_one_device(settings):
    rng = np.random.default_rng(0)
    graph, parameters = nnx.split(tiny.model())
    tokens = jnp.asarray(rng.integers(0, 264, (8, 6)))
    segment_ids = jnp.asarray(rng.integers(0, 2, (8, 1)) | (np.arange(6) < 4), jnp.int32)
    # Padding goes to no expert if experts are split.
    direction = jnp.asarray(rng.normal(size=(8, 6, 264)), jnp.float32) * (segment_ids != 0)[:, :, None]

    def on_one(parameters):
        of_logits, statistics = projected(parameters, graph, tokens, segment_ids, direction)
        return total(of_logits, statistics), statistics

    def local(parameters, *batch):
        of_logits, statistics = projected(parameters, graph, *batch, spread=Spread(expert=settings), remat=True)
        statistics = statistics.psum(AXES)
        of_logits = jax.lax.psum(of_logits, AXES)
        return total(of_logits, statistics), statistics

    def spec(path, _):
        return P(None, "expert") if "experts" in [getattr(part, "key", None) for part in path] else P()

    specs = jax.tree.map_with_path(spec, parameters)
    mesh = make_mesh(data=2, expert=4)
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(AXES), P(AXES), P(AXES)), out_specs=(P(), P()))

    def run(f):
        return jax.jit(jax.value_and_grad(f, has_aux=True))(parameters)

    (value, statistics), gradients = run(lambda p: on_mesh(p, tokens, segment_ids, direction))
    (expected_value, expected_statistics), expected = run(on_one)
    np.testing.assert_array_equal(statistics.expert_load, expected_statistics.expert_load)
    assert statistics.num_tokens == (segment_ids != 0).sum() and not statistics.num_dropped.any()
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, theirs) < 1e-5, jax.tree_util.keystr(path)


def test_num_dropped_by_layer():
    graph, parameters = nnx.split(tiny.model())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 264, (4, 200)))

    def local(parameters, tokens):
        settings = ExpertParallel(drop="position", capacity_factor=0.1)
        states = nnx.merge(graph, parameters).hidden_states(tokens, spread=Spread(expert=settings))
        return states.router.psum("expert")

    specs = jax.tree.map_with_path(lambda path, _: P(None, "expert") if "experts" in str(path) else P(), parameters)
    f = jax.shard_map(local, mesh=make_mesh(expert=4), in_specs=(specs, P("expert")), out_specs=P())
    dropped = jax.jit(f)(parameters, tokens).num_dropped
    # A device has 200 tokens of two choices. For each of four devices of one expert 64 tokens fit.
    assert dropped.shape == (2,) and (dropped >= 4 * (400 - 4 * 64)).all()


@pytest.mark.thorough
def test_padding_drops_no_token():
    """The first 96 of 160 tokens a device are padding; 64 tokens fit from a device to a device."""
    rng = seeds.rng()
    block = MoE(8, 4, 8, 2, stddev=0.5, rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = jnp.asarray(rng.normal(size=(4 * 160, 8)), jnp.float32)
    valid = jnp.tile(jnp.arange(160) >= 96, 4)
    graph, parameters = nnx.split(block)

    def local(parameters, x, valid):
        settings = ExpertParallel(transport="all_to_all", drop="position", capacity_factor=0.01)
        y, routing = nnx.merge(graph, parameters)(x, valid, spread=Spread(expert=settings))
        return y, routing.experts, routing.sums.num_dropped[None]

    specs = jax.tree.map_with_path(lambda path, _: P("expert") if "experts" in str(path) else P(), parameters)
    f = jax.shard_map(local, mesh=make_mesh(expert=4), in_specs=(specs, P("expert"), P("expert")), out_specs=P("expert"))
    y, experts, num_dropped = jax.jit(f)(parameters, x, valid)
    expected, routing = block(x)
    assert not num_dropped.any()
    assert relative_error(y[valid], expected[valid]) < 1e-5
    assert not y[~valid].any()
    np.testing.assert_array_equal(experts, routing.experts)
