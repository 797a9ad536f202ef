"""Ends a run at a loss that is not finite, before it is written into a checkpoint."""

import math
from typing import Any

import jax
import numpy as np

from moe_jax.train.data import Documents


def check_finite(record: dict[str, Any], total_loss: Any, batch: dict[str, np.ndarray], documents: Documents) -> None:
    """Ends the run at a loss that is not finite; names the documents of the batch, so that bad data can be looked at."""
    if math.isfinite(float(total_loss)) and math.isfinite(record["grad_norm"]):
        return
    sources = np.unique(batch["document"][batch["segment_ids"] > 0])
    places = "\n  ".join(documents.where(int(index)) for index in sources)
    whose = "The rows" if jax.process_count() == 1 else f"Process {jax.process_index()}'s rows"
    raise FloatingPointError(
        f"step {record['step']}: loss {record['loss']}, gradient norm {record['grad_norm']} is not finite; training stopped, "
        f"the last checkpoint is unharmed. {whose} of the batch hold pieces of:\n  {places}"
    )


def check_eval_loss(record: dict[str, Any]) -> None:
    """Ends the run at a held-out loss that is not finite."""
    if not math.isfinite(record["eval_loss"]):
        raise FloatingPointError(
            f"step {record['step']}: the held-out loss {record['eval_loss']} is not finite; training stopped, the last "
            "checkpoint is unharmed"
        )
