"""Parameters in parts on eight devices: the single device's loss and every gradient, each device with its own part of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.spread import Spread
from tests.helpers import seeds, tiny
from tests.helpers.meshes import make_mesh, relative_error


@pytest.fixture(scope="module")
def single():
    """(graph, parameters, tokens, direction, loss, gradients) of one device."""
    rng = seeds.rng(__name__)
    graph, parameters = nnx.split(tiny.model(), nnx.Param)
    tokens = jnp.asarray(rng.integers(0, 264, (8, 6)))
    direction = jnp.asarray(rng.normal(size=(8, 6, 264)), jnp.float32)

    def loss(parameters):
        model = nnx.merge(graph, parameters)
        return jnp.sum(model(tokens).logits * direction)

    return graph, parameters, tokens, direction, *jax.jit(jax.value_and_grad(loss))(parameters)


# Steps of `test_parallelism` and `test_zero1` gather parameters and sum gradients in the same way.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, remat, hops",
    [
        ({"fsdp": 8}, True, "nccl"),
        ({"data": 2, "fsdp": 4}, False, "nccl"),
        ({"data": 4, "fsdp": 2}, True, "copies"),
        ({"data": 2, "fsdp": 4}, False, "copies"),
    ],
    ids=lambda value: str(value),
)
def test_loss_and_gradients_are_those_of_one_device(single, sizes, remat, hops):
    graph, parameters, tokens, direction, expected, expected_gradients = single
    mesh, axes = make_mesh(**sizes), tuple(sizes)
    sharded = ShardedParameters.of(parameters, mesh, dtype=jnp.float32, token_axes=axes, hops=hops)

    def local(parts, tokens, direction):
        def loss(parts):
            model = nnx.merge(graph, sharded.enter(parts))
            logits = model(tokens, spread=Spread(layer_gathers=sharded.layers), remat=remat).logits
            return jax.lax.psum(jnp.sum(logits * direction), axes)

        return jax.value_and_grad(loss)(parts)

    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(sharded.specs, P(axes), P(axes)), out_specs=(P(), sharded.specs))
    parts = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), parameters, sharded.specs)
    found, gradients = jax.jit(on_mesh)(parts, tokens, direction)
    # A sum of 12672 numbers of either sign and of size about 50 may be nearly 0.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-4)
    for (path, actual), wanted in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert relative_error(actual, wanted) < 1e-5, jax.tree_util.keystr(path)
    q_proj = gradients["stages"][0]["self_attn"]["q_proj"]["weight"][...]
    assert q_proj.addressable_shards[0].data.size * sizes["fsdp"] == q_proj.size
