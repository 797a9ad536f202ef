"""Dropout of adapters in training: which numbers are left out follows from the step and the place alone.

So a run that continues leaves out the same numbers as one that never stopped. A layer that is computed again in the backward
pass leaves out the same as before.
"""

import jax
from jaxtyping import Array, Int

from moe_jax.layers.lora import draw_dropout
from moe_jax.models.decoder import Decoder
from moe_jax.train.batch import Batch

SEEDS = "dropout_seeds"
"""The array [batch] of a batch inside a step; a pass takes that of its first row."""


def with_dropout_seeds(batch: Batch, step: Int[Array, ""]) -> Batch:
    """Returns the batch with a seed for each row, so that each micro-batch and each device has its own."""
    rows = next(array.shape[0] for array in batch.values() if array.ndim)
    seeds = jax.random.bits(jax.random.fold_in(jax.random.PRNGKey(0), step), (rows,), "uint32")
    return batch | {SEEDS: seeds}


def ready_for_pass(model: Decoder, batch: Batch) -> tuple[Decoder, Batch]:
    """Returns the model with the keys of this batch's pass, and the batch without its seeds; both unchanged without seeds."""
    if SEEDS not in batch:
        return model, batch
    draw_dropout(model, batch[SEEDS][0])
    return model, {name: array for name, array in batch.items() if name != SEEDS}
