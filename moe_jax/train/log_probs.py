"""Log-probabilities of a batch's labels: the building block of losses of your own (DPO, GRPO, distillation)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.vocabulary import TokenScores, token_log_probs, token_log_probs_and_entropies
from moe_jax.models.decoder import Decoder
from moe_jax.train.batch import Batch


def log_probs(model: Decoder, batch: Batch) -> Float[Array, "batch seq"]:
    """Returns log p(label) of each label, f32, and 0 where `loss_mask` is 0; the [batch*seq, vocab] logits never exist.

        sequence_log_probs = train.log_probs(model, batch).sum(axis=1)
        cross_entropy = -train.log_probs(model, batch).sum() / batch["loss_mask"].sum()

    Weights in `loss_mask` do not multiply them.
    `model.execution` says what is recomputed and how the call is spread over devices. Inside a mesh the result is of the
    device's own tokens.

    Args:
      batch: "tokens", "labels", "loss_mask", all [batch, seq]. "segment_ids" too, where rows hold more than one document
        each. "positions" follow from the segments unless they are given.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    return _of_labels(token_log_probs, model, batch)


def log_probs_and_entropies(model: Decoder, batch: Batch) -> TokenScores:
    """Returns `log_probs`, and the entropy of what the model predicts for each label, in nats; both [batch, seq].

    Entropies are 0 where `loss_mask` is 0. They cost no further pass over the logits. Arguments and errors as in `log_probs`.
    """
    return _of_labels(token_log_probs_and_entropies, model, batch)


def _of_labels(function: Callable, model: Decoder, batch: Batch) -> Any:
    states, labels = model.hidden_states(batch["tokens"], batch.get("positions"), batch.get("segment_ids")), batch["labels"]
    found = function(states.hidden.reshape(-1, states.hidden.shape[-1]), model.head_weight, labels.reshape(-1))
    return jax.tree.map(lambda each: jnp.where(batch["loss_mask"] != 0, each.reshape(labels.shape), 0), found)
