"""Log-probabilities of a batch's labels: what losses of one's own (DPO, GRPO, distillation) are made of."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.token_log_probs import token_log_probs
from moe_jax.models.decoder import Decoder
from moe_jax.train.loss import Batch


def log_probs(model: Decoder, batch: Batch, **options: Any) -> Float[Array, "batch seq"]:
    """log p(label) of each label, f32, and 0 where `loss_mask` is 0; the [batch*seq, vocab] logits never exist.

        sequence_log_probs = train.log_probs(model, batch).sum(axis=1)
        cross_entropy = -train.log_probs(model, batch).sum() / batch["loss_mask"].sum()

    Args:
      batch: "tokens", "labels", "loss_mask", and, where rows hold more than one document each, "segment_ids", all int32
        [batch, seq]. `positions` follow from the segments unless they are there.
      options: for `Decoder.hidden_states`: remat, and inside `jax.shard_map` spread.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    states = model.hidden_states(batch["tokens"], batch.get("positions"), batch.get("segment_ids"), **options)
    hidden = states.hidden.reshape(-1, states.hidden.shape[-1])
    found = token_log_probs(hidden, model.head_weight, batch["labels"].reshape(-1)).reshape(batch["labels"].shape)
    return jnp.where(batch["loss_mask"] != 0, found, 0)
