"""The log-probabilities of the answers of a batch, each answer a segment of a packed row (`preferences.batches`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.adapters.merge import with_zero_changes, without_adapter
from moe_jax.kernels.vocabulary import token_log_probs
from moe_jax.layers.lora import has_adapters
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.preferences.batches import KL, PreferenceBatches
from moe_jax.train.batch import BATCH_ARRAYS, Batch, put_batch


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
    hidden, labels, segments = states.hidden, batch["labels"], batch["segment_ids"]
    found = token_log_probs(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.reshape(-1)).reshape(labels.shape)
    answered, predicted = batch["loss_mask"] != 0, has_label(segments)

    def of_segments(values: Float[Array, "batch seq"]) -> Float[Array, "batch segments"]:
        inside = segments[:, :, None] == jnp.arange(1, num_segments + 1)
        return jnp.where(inside, values[:, :, None], 0).sum(1)

    return AnswerSums(
        of_segments(jnp.where(answered, found, 0)),
        of_segments(answered.astype(found.dtype)),
        of_segments(jnp.where(predicted, found, 0)),
    )


def has_label(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns 1 for tokens whose successor belongs to the same text, masked or not."""
    following = jnp.pad(segments[:, 1:], [(0, 0), (0, 1)])
    return ((segments != 0) & (segments == following)).astype(jnp.int32)


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
    model: Decoder, batches: PreferenceBatches, on_batch: Callable[[int, int], Any] | None = None
) -> Float[np.ndarray, "examples 2"]:
    """Returns `reference_log_probs` of each example, by its index in the data; NaN for examples that are left out.

        in_order = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, seed=None)
        table = preferences.reference_table(model, in_order)
        batches = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, reference=table)

    Args:
      batches: at their beginning, in the data's order (`seed=None`), on the model's device. They are closed.
      on_batch: called with the number of examples done, and of all.

    Raises:
      ValueError: batches that are shuffled or have begun.
    """
    if batches.seed is not None or batches.position:
        raise ValueError("a table of the reference needs batches in the data's order, from their beginning: give seed=None")
    number, params = len(batches.preferences), nnx.state(model, nnx.Param)
    table = np.full((number, 2), np.nan, np.float32)
    compute = nnx.jit(reference_log_probs)
    try:
        while batches.position < number:
            batch = next(batches)
            found, present = np.asarray(compute(model, put_batch(batch, params))), batch["example"] >= 0
            table[batch["example"][present]] = found[present]
            if on_batch is not None:
                on_batch(min(batches.position, number), number)
    finally:
        batches.close()
    return table


def _without_gradients(model: Decoder) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
