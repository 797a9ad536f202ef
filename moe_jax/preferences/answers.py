"""The log-probabilities of the answers of a batch, each answer a segment of a packed row (`preferences.batches`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.adapters.merge import with_zero_changes, without_adapter
from moe_jax.kernels.varying import vary_as
from moe_jax.kernels.vocabulary import token_log_probs
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.spread import OneDevice
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.preferences.batches import KL, PreferenceBatches
from moe_jax.train.batch import BATCH_ARRAYS, Batch, put_batch
from moe_jax.train.on_devices import on_devices


class AnswerSums(NamedTuple):
    """Sums over the tokens of each segment of the rows. The segment numbers begin with 1, the last axis with 0."""

    log_probs: Float[Array, "batch segments"]
    """Sums of log-probabilities over each answer's tokens."""
    lengths: Float[Array, "batch segments"]
    """The number of the answer's tokens."""
    text_log_probs: Float[Array, "batch segments"]
    """The same sums over all of a text's tokens, prompts too."""

    @property
    def means(self) -> Float[Array, "batch segments"]:
        """The mean log-probability of an answer's tokens; 0 for segments that the row does not have."""
        return self.log_probs / self.lengths.clip(1)


def answer_sums(model: Decoder, states: HiddenStates, batch: Batch, num_segments: int) -> AnswerSums:
    """Returns the sums of a batch's segments, from the hidden states of its tokens; [tokens, vocab] logits never exist."""
    hidden, labels, segments, spread = states.hidden, batch["labels"], batch["segment_ids"], model.execution.spread
    found = token_log_probs(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.reshape(-1)).reshape(labels.shape)
    answered = batch["loss_mask"] != 0

    def of_segments(values: Array) -> Array:
        inside = segments[:, :, None] == jnp.arange(1, num_segments + 1)
        summed = jnp.where(inside, values[:, :, None], 0).sum(1)
        return summed if spread.context is None else jax.lax.psum(summed, spread.context.axis_name)

    # Neighbours in a sequence may be on other devices, so that the last token of a text is found by its position.
    lengths = jnp.pad(of_segments(jnp.ones_like(segments)), [(0, 0), (1, 0)])
    predicted = batch["positions"] + 1 < jnp.take_along_axis(lengths, segments, axis=1)
    return AnswerSums(
        of_segments(jnp.where(answered, found, 0)),
        of_segments(answered.astype(found.dtype)),
        of_segments(jnp.where(predicted, found, 0)),
    )


def row_axes(spread: OneDevice) -> tuple[str, ...]:
    """Returns the mesh axes along which devices hold other rows; sums of a row's tokens are equal along `context`."""
    return tuple(axis for axis in spread.mesh_axes if spread.context is None or axis != spread.context.axis_name)


def sum_of_rows[Values](spread: OneDevice, values: Values) -> Values:
    """Sums arrays over all devices that hold other rows; returns them unchanged on one device."""
    axes = row_axes(spread)
    return jax.lax.psum(values, axes) if axes else values


def answer_log_probs(model: Decoder, batch: Batch, num_segments: int, prefix: str = "") -> Float[Array, "batch segments"]:
    """Returns the log-probability of each answer of the arrays whose names begin with `prefix`, without a gradient."""
    model = _without_gradients(model)
    arrays = {name: batch[prefix + name] for name in BATCH_ARRAYS}
    states = model.hidden_states(arrays["tokens"], arrays["positions"], arrays["segment_ids"])
    return answer_sums(model, states, arrays, num_segments).log_probs


def reference_log_probs(model: Decoder, batch: Batch) -> Float[Array, "batch examples 2"]:
    """Returns the log-probabilities that a loss with a reference compares with; they belong in the batch under this name.

    The last axis is (chosen, rejected), or of single answers (the answer, the mismatched answer). A model with adapters leaves
    them off, so that it is its own reference. For another reference model call this with it before each step:

        batch["reference_log_probs"] = nnx.jit(preferences.reference_log_probs)(reference_model, batch)
    """
    if has_adapters(model):
        model = with_zero_changes(model) if model.precision is not None else without_adapter(model)
    examples = batch["example"].shape[1]
    if KL + "tokens" in batch:
        return jnp.stack([answer_log_probs(model, batch, examples, prefix) for prefix in ("", KL)], axis=-1)
    return answer_log_probs(model, batch, 2 * examples).reshape(-1, examples, 2)


def reference_table(
    model: Decoder,
    batches: PreferenceBatches,
    on_batch: Callable[[int, int], Any] | None = None,
    *,
    parallelism: Parallelism | None = None,
) -> Float[np.ndarray, "examples 2"]:
    """Returns `reference_log_probs` of each example, by its index in the data; NaN for examples that are left out.

        in_order = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, seed=None)
        table = preferences.reference_table(model, in_order)
        batches = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, reference=table)

    Args:
      batches: at their beginning, in the data's order (`seed=None`). They are closed.
      on_batch: called with the number of examples done, and of all.
      parallelism: the mesh that the model lies on, as in `train.make_train_step`.

    Raises:
      ValueError: batches that are shuffled or have begun.
    """
    if batches.seed is not None or batches.position:
        raise ValueError("a table of the reference needs batches in the data's order, from their beginning: give seed=None")
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    (fixed,), number = rest, len(batches.preferences)
    table = np.full((number, 2), np.nan, np.float32)
    options = None if parallelism is None else parallelism.compiler_options
    compute = jax.jit(on_devices(_of_all_rows, graph, parallelism=parallelism), compiler_options=options)
    try:
        while batches.position < number:
            batch = next(batches)
            found = np.asarray(compute(params, fixed, put_batch(batch, params, parallelism)))
            present = batch["example"] >= 0
            table[batch["example"][present]] = found[present]
            if on_batch is not None:
                on_batch(min(batches.position, number), number)
    finally:
        batches.close()
    return table


def _of_all_rows(model: Decoder, batch: Batch) -> Float[Array, "all_rows examples 2"]:
    """Returns the `reference_log_probs` of the rows of all devices, on each of them."""
    found, axes = reference_log_probs(model, batch), row_axes(model.execution.spread)
    if not axes:
        return found
    devices, rows = jax.lax.axis_size(axes), len(found)
    whole = vary_as(jnp.zeros((devices * rows, *found.shape[1:]), found.dtype), found)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(whole, found, jax.lax.axis_index(axes) * rows, 0), axes)


def _without_gradients(model: Decoder) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
