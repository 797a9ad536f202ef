"""A rehearsal of a run: checks everything, and prints the text that the run would learn from. Trains and writes nothing."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.prepare import plan_run, saved_run
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Documents
from moe_jax.train.data.report import COLORED, PLAIN, marked


def dry_run(settings: FinetuneSettings, *, model: Decoder | None = None, tokenizer: Any = None) -> None:
    """Prints the announcement of `finetune`, and the first row of its first batch with the learned text marked.

    Args: as in `finetune`. No weights are read, and no file is written.

    Raises:
      ValueError, FileNotFoundError: as `finetune` raises before it reads weights.
    """
    run = plan_run(settings, model, tokenizer)
    steps_done = saved_run(Path(settings.output).expanduser()).steps_done
    try:
        batch = next(run.batches)
    finally:
        run.batches.close()
    if is_first_process():
        row = int(np.argmax(batch["loss_mask"].any(axis=1)))
        print(announcement(run, steps_done))
        print(f"\nA row of the first batch; learned text is {'green' if sys.stdout.isatty() else 'in [[ ]]'}:\n")
        marks = COLORED if sys.stdout.isatty() else PLAIN
        print(described_row({name: array[row] for name, array in batch.items()}, run.documents, run.tokenizer, marks))
        print("\ndry run: nothing was trained or written")


def described_row(row: dict[str, np.ndarray], documents: Documents, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Returns the text of a packed row ([seq_len] by name), segment by segment, with learned text between `marks`.

    A piece's first token counts as not learned: if a document was cut there, the piece before learned the token.
    """
    parts = []
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        inside = np.flatnonzero(row["segment_ids"] == segment)
        tokens = row["tokens"][inside]
        weights = row["loss_mask"][inside]
        parts.append(
            f"--- segment {segment}: {len(inside)} tokens, {int((weights != 0).sum())} learned, of "
            f"{documents.where(int(row['document'][inside[0]]))}"
        )
        parts.append(marked(tokenizer, tokens, np.append(0, weights[:-1]).astype(np.float32), marks))
    parts.append(f"--- padding: {int((row['segment_ids'] == 0).sum())} tokens")
    return "\n".join(parts)
