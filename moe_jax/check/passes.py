"""Forward and backward pass of a model over one sequence, on the devices that hold the model."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.kernels.varying import vary_as
from moe_jax.layers.router import ExpertBias
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.spread import Spread


class PassFunctions(NamedTuple):
    """The passes of a model over one sequence, as functions of the same arguments."""

    forward: Callable
    """forward(*arguments) returns the last token's logits in float32."""
    both: Callable
    """both(*arguments) returns the sum of all logits and its gradients to the parameters."""
    arguments: tuple


def passes_over(model: Decoder, tokens: list[int]) -> PassFunctions:
    """Returns the passes of a model over `tokens`, on the devices that hold its parameters.

    On a mesh, matrices are gathered layer by layer and tokens travel to their experts. Each device has one row of tokens. The
    first row is the sequence; all others are padding, which does not take part.
    """
    graph, parameters, *biases = nnx.split(model, nnx.Param, ExpertBias)
    mesh = mesh_of(parameters)
    if mesh is None:
        forward, both = _on_one(graph)
        return PassFunctions(forward, both, (parameters, biases, jnp.asarray(tokens, jnp.int32)[None]))
    forward, both = _on(mesh, graph, parameters, model.dtype)
    return PassFunctions(forward, both, (parameters, biases, *_rows_of_devices(tokens, mesh)))


def _on_one(graph: nnx.GraphDef) -> tuple[Callable, Callable]:
    def logits(parameters, biases, tokens):
        return nnx.merge(graph, parameters, *biases)(tokens).logits.astype(jnp.float32)

    def last_logits(*arguments):
        return logits(*arguments)[0, -1]

    def logit_sum(*arguments):
        return logits(*arguments).sum()

    return last_logits, jax.value_and_grad(logit_sum)


def _on(mesh: Mesh, graph: nnx.GraphDef, parameters: nnx.State, dtype) -> tuple[Callable, Callable]:
    axes = mesh.axis_names
    sharded = ShardedParameters.of(parameters, mesh, dtype=dtype, token_axes=axes)
    exchange = ExpertParallel() if mesh.shape.get("expert", 1) > 1 else None
    spread = Spread(expert=exchange, layer_gathers=sharded.layers, mesh_axes=axes)

    def logits(parameters, biases, tokens, segment_ids):
        model = nnx.merge(graph, sharded.enter(parameters), *vary_as(biases, tokens))
        output = model(tokens, segment_ids=segment_ids, spread=spread)
        return jnp.where(segment_ids[..., None] != 0, output.logits.astype(jnp.float32), 0)

    def last_logits(*arguments):
        return jax.lax.psum(logits(*arguments)[0, -1], axes)

    def logit_sum(*arguments):
        return jax.lax.psum(logits(*arguments).sum(), axes)

    whole, rows = PartitionSpec(), PartitionSpec(axes)
    in_specs = sharded.specs, whole, rows, rows
    forward = jax.shard_map(last_logits, mesh=mesh, in_specs=in_specs, out_specs=whole)
    both = jax.shard_map(jax.value_and_grad(logit_sum), mesh=mesh, in_specs=in_specs, out_specs=(whole, sharded.specs))
    return forward, both


def _rows_of_devices(tokens: list[int], mesh: Mesh) -> list[jax.Array]:
    """Returns tokens and segment_ids, [devices, tokens] each, spread over the mesh."""
    rows, segment_ids = (np.zeros((mesh.size, len(tokens)), np.int32) for _ in range(2))
    rows[0], segment_ids[0] = tokens, 1
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return [jax.make_array_from_callback(a.shape, place, a.__getitem__) for a in (rows, segment_ids)]
