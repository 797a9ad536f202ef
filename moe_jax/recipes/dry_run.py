"""A rehearsal of a run: checks everything, and prints the text that the run would learn from. Trains and writes nothing."""

import sys
from typing import Any

import numpy as np

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import example_tokens
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.prepare import plan_run
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.preferring.loop import plan_preferences
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.identity import saved_run
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Documents
from moe_jax.train.data.report import COLORED, PLAIN, marked


def dry_run(settings: FinetuneSettings | PreferSettings, *, model: Decoder | None = None, tokenizer: Any = None) -> None:
    """Prints the announcement of `finetune` or `prefer`, and a part of the first batch with the learned text marked.

    Args: as in `finetune` and `prefer`. No weights are read, and no file is written.

    Raises:
      ValueError, FileNotFoundError: as the run raises before it reads weights.
    """
    marks = COLORED if sys.stdout.isatty() else PLAIN
    if isinstance(settings, PreferSettings):
        text = _of_preferences(settings, model, tokenizer, marks)
    else:
        text = _of_texts(settings, model, tokenizer, marks)
    if is_first_process():
        print(f"{text}\n\ndry run: nothing was trained or written")


def _of_texts(settings: FinetuneSettings, model: Decoder | None, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Describes a fine-tuning run, with the first row of its first batch that has learned text."""
    run = plan_run(settings, model, tokenizer)
    try:
        batch = next(run.batches)
    finally:
        run.batches.close()
    row = int(np.argmax(batch["loss_mask"].any(axis=1)))
    said = described_row({name: array[row] for name, array in batch.items()}, run.documents, run.tokenizer, marks)
    how = f"learned text is {'green' if marks == COLORED else 'in [[ ]]'}"
    return f"{announcement(run, saved_run(settings.output)[0])}\n\nA row of the first batch; {how}:\n\n{said}"


def _of_preferences(settings: PreferSettings, model: Decoder | None, tokenizer: Any, marks: tuple[str, str]) -> str:
    """Describes a run on preferences, with the texts of its first example."""
    plan = plan_preferences(settings, model, tokenizer)
    batches = plan.batches(plan.data)
    batches.close()
    tokens = example_tokens(plan.data, plan.tokenizer, batches.max_length)
    example = next(filter(None, map(tokens, range(len(plan.data)))))
    parts, names = [plan.announcement(saved_run(settings.output)[0])], ("chosen", "rejected")
    for name, text in zip(names if plan.data.of_pairs else ("answer",), example.texts, strict=True):
        parts.append(f"--- {name} of {plan.data.where(example.number)}: {len(text.tokens)} tokens")
        parts[-1] += f"\n{marked(plan.tokenizer, text.tokens, text.learned, marks)}"
    return "\n\n".join(parts)


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
