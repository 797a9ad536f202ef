"""The loss on text that a model is not trained on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.models.decoder import Decoder
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import BATCH_ARRAYS, Batch
from moe_jax.train.loss import LossWeights, loss
from moe_jax.train.on_devices import on_devices
from moe_jax.train.state import TrainState


class CrossEntropySum(NamedTuple):
    """A batch's cross-entropy, summed over its labels, and their number."""

    summed: Float[Array, ""]
    num_labels: Float[Array, ""]


def make_evaluation(
    graphdef: nnx.GraphDef, *, parallelism: Parallelism | None = None
) -> Callable[[TrainState, Sequence[Batch]], float]:
    """Returns evaluate(state, batches): the mean cross-entropy of the batches' labels, and no other loss. The state stays.

    Args:
      graphdef: `nnx.graphdef(model)`.
      parallelism: as in `make_train_step`; `put_batch` puts the batches there.
    """
    call = on_devices(_cross_entropy, graphdef, parallelism=parallelism)
    compiled = jax.jit(call, compiler_options=None if parallelism is None else parallelism.compiler_options)

    def evaluate(state: TrainState, batches: Sequence[Batch]) -> float:
        own = ({name: batch[name] for name in BATCH_ARRAYS} for batch in batches)
        sums = jax.device_get([compiled(state.params, state.expert_bias, batch) for batch in own])
        return float(sum(of_batch.summed for of_batch in sums)) / max(1.0, float(sum(of_batch.num_labels for of_batch in sums)))

    return evaluate


def _cross_entropy(model: Decoder, batch: Batch) -> CrossEntropySum:
    _, parts = loss(model, batch, LossWeights(mtp_loss_coef=0))
    return CrossEntropySum(parts.cross_entropy, parts.num_labels)
