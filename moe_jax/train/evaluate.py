"""The loss on text that a model is not trained on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.layers.passes import run_together
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import BATCH_ARRAYS, Batch
from moe_jax.train.loss import LossWeights, loss, loss_of_states
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
      parallelism: as in `make_train_step`; `put_batch` puts the batches there. If its `overlap_micro_batches` is True, two
        batches at a time pass the layers in one loop. None computes them in turn: overlapping was not measured here.

    Raises:
      ValueError: layers that lie in a pipeline.
    """
    if parallelism is not None and parallelism.pipelined:
        raise ValueError(
            "evaluation does not run through a pipeline yet: move the parameters to a mesh without pipe with "
            "parallel.pipeline.chunks.from_chunks, and evaluate there"
        )
    options = None if parallelism is None else parallelism.compiler_options
    of_one, of_two = (
        jax.jit(on_devices(function, graphdef, parallelism=parallelism), compiler_options=options)
        for function in (_cross_entropy, _cross_entropy_of_two)
    )
    at_once = 2 if parallelism is not None and parallelism.overlap_micro_batches else 1

    def evaluate(state: TrainState, batches: Sequence[Batch]) -> float:
        own = [{name: batch[name] for name in BATCH_ARRAYS} for batch in batches]
        sums = []
        for batch, *further in (own[i : i + at_once] for i in range(0, len(own), at_once)):
            if further:
                batch |= {SECOND + name: array for name, array in further[0].items()}
            sums.append((of_two if further else of_one)(state.params, state.expert_bias, batch))
        sums = jax.device_get(sums)
        return float(sum(of_batch.summed for of_batch in sums)) / max(1.0, float(sum(of_batch.num_labels for of_batch in sums)))

    return evaluate


SECOND = "second_"
"""Names of the second batch's arrays begin so where two batches are one."""


def _cross_entropy_of_two(model: Decoder, both: Batch) -> CrossEntropySum:
    batches = [{name: both[prefix + name] for name in BATCH_ARRAYS} for prefix in ("", SECOND)]
    passes = [model.forward_pass(b["tokens"], b["positions"], b["segment_ids"]) for b in batches]
    sums = []
    for states, batch in zip(run_together(*passes), batches, strict=True):
        _, parts = loss_of_states(model, states, batch, LossWeights(mtp_loss_coef=0))
        sums.append(CrossEntropySum(parts.cross_entropy, parts.num_labels))
    return jax.tree.map(jnp.add, *sums)


def _cross_entropy(model: Decoder, batch: Batch) -> CrossEntropySum:
    _, parts = loss(model, batch, LossWeights(mtp_loss_coef=0))
    return CrossEntropySum(parts.cross_entropy, parts.num_labels)
