"""The loss on text that a model is not trained on."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.loss import BATCH_ARRAYS, Batch, loss
from moe_jax.train.step import TrainState, mesh_options

Sums = tuple[Float[Array, ""], Float[Array, ""]]


def make_evaluation(
    graphdef: nnx.GraphDef, *, parallelism: Parallelism | None = None
) -> Callable[[TrainState, Sequence[Batch]], float]:
    """evaluate(state, batches) -> the mean cross-entropy of the batches' labels, and no other loss; the state stays as it is.

    Args:
      graphdef: `nnx.graphdef(model)`.
      parallelism: as in `make_train_step`; batches are those of `put_batch`.
    """

    def of_batch(params, expert_bias, batch: Batch, **options) -> Sums:
        _, parts = loss(nnx.merge(graphdef, params, expert_bias), batch, mtp_loss_coef=0, **options)
        return parts.cross_entropy, parts.num_labels

    def of_spread_batch(params, expert_bias, batch: Batch) -> Sums:
        if parallelism is None:
            return of_batch(params, expert_bias, batch)
        dtype, axes = nnx.merge(graphdef, params, expert_bias).dtype, parallelism.token_axes
        sharded = ShardedParameters.of(params, parallelism.mesh, dtype=dtype, token_axes=axes, hops=parallelism.hops)

        def local(params, expert_bias, batch):
            return of_batch(sharded.enter(params), expert_bias, batch, **mesh_options(parallelism, sharded))

        in_specs = sharded.specs, PartitionSpec(), parallelism.batch_spec
        on_mesh = jax.shard_map(local, mesh=parallelism.mesh, in_specs=in_specs, out_specs=PartitionSpec())
        return on_mesh(params, expert_bias, batch)

    compiled = jax.jit(of_spread_batch, compiler_options=None if parallelism is None else parallelism.compiler_options)

    def evaluate(state: TrainState, batches: Sequence[Batch]) -> float:
        own = ({name: batch[name] for name in BATCH_ARRAYS} for batch in batches)
        sums = jax.device_get([compiled(state.params, state.expert_bias, batch) for batch in own])
        return float(sum(summed for summed, _ in sums)) / max(1.0, float(sum(labels for _, labels in sums)))

    return evaluate
