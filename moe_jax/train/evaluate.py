"""The loss on held-out text."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.layers.loops import run_together
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import BATCH_ARRAYS, Batch
from moe_jax.train.loss import LossWeights, loss, loss_of_states
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import on_devices
from moe_jax.train.pipelined import evaluate_pipelined
from moe_jax.train.state import TrainState

Sums = tuple[Float[Array, ""], Float[Array, ""]]
"""A batch's cross-entropy, summed over its labels, and the number of labels; both weighted if labels have weights."""


def make_evaluation(
    graphdef: nnx.GraphDef, *, parallelism: Parallelism | None = None
) -> Callable[[TrainState, Sequence[Batch]], float]:
    """Returns evaluate(state, batches) -> mean cross-entropy over the labels of all batches, without auxiliary losses.

    The state is not donated.

    If labels have weights, the mean is weighted: sum of weights * losses / sum of weights.

    Args:
      graphdef: `nnx.graphdef(model)`.
      parallelism: as in `make_train_step`; `put_batch` puts the batches there. If its `overlap_micro_batches` is True, two
        batches at a time run through the layers in one loop. None computes them in turn: overlapping was not measured here. In
        a pipe, one program streams all batches of a call, which must have equal shapes. On p ranks with one chunk each, n
        batches take the time of n + p - 1 batches on one rank.
    """
    if parallelism is not None and parallelism.pipelined:
        return _through_pipe(graphdef, parallelism)
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
            sums.append((of_two if further else of_one)(state.params, state.fixed, batch))
        summed, weights = zip(*jax.device_get(sums), strict=True) if sums else ((), ())
        return _mean(sum(summed), sum(weights))

    return evaluate


class _CrossEntropy(Objective):
    """Only the cross-entropy; aux is `Sums`."""

    def of_states(self, model: Decoder, states: HiddenStates, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        _, parts = loss_of_states(model, states, batch, LossWeights(mtp_loss_coef=0))
        return parts.cross_entropy, (parts.cross_entropy, parts.num_labels)


def _through_pipe(graphdef: nnx.GraphDef, parallelism: Parallelism) -> Callable[[TrainState, Sequence[Batch]], float]:
    """Returns evaluate(state, batches), where each batch is a micro-batch of a pipeline."""

    def compute(params: nnx.State, fixed: nnx.State, batches: list[Batch]) -> Sums:
        # Row r of batch i of n becomes row r n + i: micro-batch i of these rows is batch i, and its rows do not move.
        rows = {
            name: jnp.stack([b[name] for b in batches], 1).reshape(-1, *batches[0][name].shape[1:]) for name in BATCH_ARRAYS
        }
        return evaluate_pipelined(_CrossEntropy(), graphdef, parallelism, len(batches))(params, fixed, rows)[1]

    compiled = jax.jit(compute, compiler_options=parallelism.compiler_options)

    def evaluate(state: TrainState, batches: Sequence[Batch]) -> float:
        if len({batch["tokens"].shape for batch in batches}) > 1:
            shapes = sorted({tuple(batch["tokens"].shape) for batch in batches})
            raise ValueError(f"batches that flow through a pipe must have equal shapes; got {shapes}: evaluate them in turn")
        if not batches:
            return 0.0
        own = [{name: batch[name] for name in BATCH_ARRAYS} for batch in batches]
        return _mean(*jax.device_get(compiled(state.params, state.fixed, own)))

    return evaluate


def _mean(summed: np.ndarray | int, weight: np.ndarray | int) -> float:
    return float(summed) / (float(weight) or 1.0)


SECOND = "second_"
"""Prefix of the second batch's arrays when two batches are merged into one."""


def _cross_entropy_of_two(model: Decoder, both: Batch) -> Sums:
    batches = [{name: both[prefix + name] for name in BATCH_ARRAYS} for prefix in ("", SECOND)]
    passes = [model.forward_pass(b["tokens"], b["positions"], b["segment_ids"]) for b in batches]
    sums = []
    for states, batch in zip(run_together(*passes), batches, strict=True):
        _, parts = loss_of_states(model, states, batch, LossWeights(mtp_loss_coef=0))
        sums.append((parts.cross_entropy, parts.num_labels))
    return jax.tree.map(jnp.add, *sums)


def _cross_entropy(model: Decoder, batch: Batch) -> Sums:
    _, parts = loss(model, batch, LossWeights(mtp_loss_coef=0))
    return (parts.cross_entropy, parts.num_labels)
