"""Tokens that a model drops where experts are split over the mesh: counts of each layer, and padding drops none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.layers.moe import MoE
from moe_jax.parallel import ExpertParallel, Spread
from tests.helpers import seeds, tiny
from tests.helpers.meshes import make_mesh, relative_error


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
