"""Batches: the arrays that a training step reads, their layout on devices, and their split into micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.sequence.layouts import shard_sequence

Batch = dict[str, Int[Array, "batch seq"] | Float[Array, "batch seq"]]
"""tokens, labels (the next token of the same document), loss_mask (0 or 1), positions, segment_ids, all int32. Or loss_mask is
f32, and holds a weight >= 0 for each label. A batch may hold more arrays, such as "document" from `train.batches`. Inside a
step it also holds scalars, which all micro-batches share."""

BATCH_ARRAYS = ("tokens", "labels", "loss_mask", "positions", "segment_ids")
"""The arrays of a batch that `train.loss` reads."""

USED = "used_micro_batches"
"""A scalar that an objective's `prepare` may add: the number of micro-batches to compute. The others hold only padding. One
program then serves batches of any number of micro-batches up to its own."""

OF_EXAMPLES = ("example", "desirable", "reference_log_probs")
"""Arrays [batch, examples, ...] of a batch of preferences, which has the first of them. They belong to rows: `context` splits
the tokens of a row alone."""


def put_batch(batch: dict[str, np.ndarray], params: nnx.State, parallelism: Parallelism | None = None) -> dict[str, jax.Array]:
    """Transfers a batch to the devices that hold the parameters, sharded over rows and (with `parallelism`) sequences.

    Without `parallelism`, rows are split over the mesh axes `data` and `fsdp` if these divide them. Each of several processes
    passes a batch of all rows and puts the parts of its own devices there. Rows of other processes may hold anything
    (`Parallelism.own_rows`). Arrays are [batch, seq, ...]; your own loss may also read arrays [batch].

    Raises:
      ValueError: arrays differ in their number of rows, or one has none.
    """
    shapes = {name: np.shape(array) for name, array in batch.items()}
    if () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"all arrays of a batch must be [batch, ...], of the same number of rows; got the shapes {shapes}")
    if parallelism is None:
        sharding = _split_rows(num_rows(batch), replicated_sharding(params))
        return _put(batch, dict.fromkeys(batch, sharding))
    if (context := parallelism.context_parallel) is not None:
        ways = parallelism.mesh.shape[context.axis_name]
        whole = {name: x for name, x in batch.items() if x.ndim < 2 or name in _of_rows(batch)}
        split = {name: x for name, x in batch.items() if name not in whole}
        batch = whole | jax.tree.map(lambda x: shard_sequence(x, ways, context.layout), split)
    parallelism.check_batch(num_rows(batch))
    return _put(batch, {name: NamedSharding(parallelism.mesh, spec) for name, spec in batch_specs(batch, parallelism).items()})


def batch_specs(batch: dict[str, Any], parallelism: Parallelism) -> dict[str, PartitionSpec]:
    """Returns each batch array's PartitionSpec: `Parallelism.batch_spec`, truncated to its rank. Scalars are replicated."""
    of_rows = _of_rows(batch) if parallelism.context_parallel else ()
    axes = {name: min(array.ndim, 1) if name in of_rows else array.ndim for name, array in batch.items()}
    return {name: PartitionSpec(*parallelism.batch_spec[: axes[name]]) for name in batch}


def _of_rows(batch: dict[str, Any]) -> tuple[str, ...]:
    # A loss of a user's own may give [batch, seq] arrays such names.
    return OF_EXAMPLES if OF_EXAMPLES[0] in batch else ()


def micro_batches_of(batch: Batch, micro_batches: int) -> tuple[Batch, Batch]:
    """Splits a batch into (arrays with a leading micro-batch axis, scalars shared by all micro-batches).

    Raises:
      ValueError: the number of micro-batches does not divide the rows.
    """

    def strided(x: Array) -> Array:
        # Micro-batch i has the rows i, i+n, ...: each stays spread over the same devices as the whole batch.
        if x.shape[0] % micro_batches:
            raise ValueError(f"the batch has {x.shape[0]} rows, which gradient_accumulation={micro_batches} does not divide")
        return x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    scalars = {name: x for name, x in batch.items() if not x.ndim}
    return {name: strided(x) for name, x in batch.items() if x.ndim}, scalars


def micro_batch_at(stacked: Batch, i: int | Int[Array, ""]) -> Batch:
    """Slices micro-batch i from the stacked arrays of `micro_batches_of`, without the scalars; i may be traced."""
    return {name: x[i] for name, x in stacked.items()}


def num_rows(batch: dict[str, Any]) -> int:
    """Returns the number of rows of a batch without scalars."""
    return next(iter(batch.values())).shape[0]


def total_weight(loss_mask: Int[Array, "*shape"] | Float[Array, "*shape"]) -> Float[Array, ""]:
    """Returns the sum of label weights in f32; for an integer mask this is the number of labels."""
    weights = loss_mask if jnp.issubdtype(loss_mask.dtype, jnp.floating) else loss_mask != 0
    return weights.sum().astype(jnp.float32)


def as_divisor(weight: Float[Array, ""]) -> Float[Array, ""]:
    """Returns a sum of weights for use as a divisor: 1 instead of 0 if there are no labels."""
    return jnp.where(weight > 0, weight, 1)


def replicated_sharding(params: nnx.State) -> Sharding:
    """Returns the Sharding that replicates an array on all devices of the parameters."""
    sharding = jax.tree.leaves(params)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _put(batch: dict[str, np.ndarray], shardings: dict[str, Sharding]) -> dict[str, jax.Array]:
    if all(sharding.is_fully_addressable for sharding in shardings.values()):
        return jax.device_put(batch, shardings)
    # Here device_put would first send every batch to all processes, to check that it is the same everywhere.
    return {name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__) for name, x in batch.items()}


def _split_rows(rows: int, sharding: Sharding) -> Sharding:
    """Returns a sharding for arrays with `rows` rows on the devices of `sharding`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes: list[str] = []
    for axis in ("data", "fsdp"):
        ways = sharding.mesh.shape.get(axis, 1)
        if rows % ways == 0:
            rows, axes = rows // ways, [*axes, axis]
    return NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))
