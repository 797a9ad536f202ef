"""The reference's log-probabilities of a whole data set, computed once before all of a model is trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.answers import reference_log_probs
from moe_jax.preferences.batches import PreferenceBatches
from moe_jax.train.batch import put_batch


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
