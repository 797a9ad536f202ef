"""A model over split, packed sequences has the loss, statistics and gradients of a single device."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.config import RopeParameters
from moe_jax.layers.router import ExpertBias
from moe_jax.layers.segments import segment_positions
from moe_jax.models.execution import Execution
from moe_jax.parallel import ContextParallel, Spread, make_mesh, shard_sequence
from moe_jax.train.loss import LossWeights, loss
from tests.helpers import seeds, tiny
from tests.helpers.meshes import relative_error

BATCH, SEQ = 2, 48
WEIGHTS = LossWeights(aux_loss_coef=0.1, z_loss_coef=0.1)


def qwen():
    # A window in the second layer only: within the scan over layers it is a traced value.
    config = replace(
        tiny.model().config, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=9
    )
    return moe_jax.from_config(config, rngs=nnx.Rngs(0))


def deepseek():
    # Latents travel in place of keys and values.
    config = replace(tiny.deepseek().config, num_hidden_layers=2, first_k_dense_replace=2)
    return moe_jax.from_config(config, rngs=nnx.Rngs(0))


def make_batch(rng):
    ids = np.stack([np.repeat([1, 2, 3, 0], [5, 21, 13, 9]), np.repeat([1, 2, 0], [33, 14, 1])])
    tokens, labels = rng.integers(0, 264, (2, BATCH, SEQ))
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (ids != 0) & (rng.random(ids.shape) < 0.8),
        "positions": segment_positions(jnp.asarray(ids)),
        "segment_ids": ids,
    }
    return {name: jnp.asarray(a, jnp.int32) for name, a in batch.items()}


# In CI, `test_parallelism.test_two_steps` splits sequences of such a model.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, data, context, layout, method, inside",
    [(qwen, 2, 4, "zigzag", "ring", True), (deepseek, 1, 2, "striped", "ulysses", False)],
)
def test_loss_and_gradients(make_model, data, context, layout, method, inside):
    """With `inside` the gradient is taken inside `shard_map`, otherwise outside. Labels have weights."""
    graph, parameters, biases = nnx.split(make_model(), nnx.Param, ExpertBias)
    batch = make_batch(seeds.rng())
    batch["loss_mask"] = batch["loss_mask"] * jnp.linspace(0.1, 3, SEQ, dtype=jnp.float32)

    def of_device(parameters, batch, **execution):
        model = nnx.merge(graph, parameters, biases)
        model.execution = Execution(**execution)
        return loss(model, batch, WEIGHTS)

    def with_gradients(f):
        return jax.value_and_grad(f, has_aux=True)

    spread = Spread(context=ContextParallel(layout=layout, method=method), mesh_axes=("data", "context"))
    local = functools.partial(of_device, spread=spread)
    mesh = make_mesh(data=data, context=context, devices=jax.devices()[: data * context])
    specs = {"mesh": mesh, "in_specs": (P(), P("data", "context")), "out_specs": P()}
    run = jax.shard_map(with_gradients(local), **specs) if inside else with_gradients(jax.shard_map(local, **specs))
    split = {name: shard_sequence(a, context, layout) for name, a in batch.items()}
    (found, found_parts), found_gradients = jax.jit(run)(parameters, split)
    (total, parts), gradients = jax.jit(with_gradients(of_device))(parameters, batch)
    np.testing.assert_allclose(found, total, rtol=1e-6)
    for actual, expected in zip(jax.tree.leaves(found_parts), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for path, expected in jax.tree.leaves_with_path(gradients):
        actual = dict(jax.tree.leaves_with_path(found_gradients))[path]
        assert relative_error(actual, expected) < 1e-5, jax.tree_util.keystr(path)


@pytest.mark.thorough
def test_default_positions():
    """Also where the rotary base depends on the longest document, and a device's rows are shorter."""
    rope = RopeParameters(rope_type="dynamic", factor=2.0)
    config = replace(tiny.dense().config, num_hidden_layers=1, max_position_embeddings=8, rope_parameters=rope)
    graph, parameters = nnx.split(moe_jax.from_config(config, rngs=nnx.Rngs(0)))
    batch = make_batch(seeds.rng())

    def logits(context_parallel=None):
        model = nnx.merge(graph, parameters)
        return lambda tokens, ids: model(tokens, segment_ids=ids, spread=Spread(context=context_parallel)).logits

    expected = jax.jit(logits())(batch["tokens"], batch["segment_ids"])
    mesh = make_mesh(data=2, context=2, devices=jax.devices()[:4])
    split = [shard_sequence(batch[name], 2) for name in ("tokens", "segment_ids")]
    spec = P("data", "context")
    on_mesh = jax.shard_map(logits(ContextParallel()), mesh=mesh, in_specs=spec, out_specs=spec)
    assert relative_error(jax.jit(on_mesh)(*split), shard_sequence(expected, 2)) < 1e-5


def test_errors():
    model, batch = qwen(), make_batch(seeds.rng())
    model.execution = Execution(spread=Spread(context=ContextParallel(), mesh_axes=("data",)))
    with pytest.raises(ValueError, match=r"mesh_axes must name the axis of Spread.context, 'context'; got \('data',\)"):
        loss(model, batch)
