"""The settings of a run on preferences, checked as a whole before anything happens."""

from dataclasses import dataclass
from typing import ClassVar

from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.run.settings import RunSettings, file_problems


@dataclass(frozen=True)
class PreferSettings(RunSettings):
    """Train a model on preferences (DPO and others). The same command continues an interrupted run.

    moe-jax prefer --model Qwen/Qwen3-30B-A3B --data pairs.jsonl --output runs/mine --lora.rank 32 --preference.beta 0.1

    The settings of `recipes.prefer`; wrong values raise a ValueError that lists them.

    Attributes:
      data: a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a folder of some, in a layout of docs/preferences.md.
      eval_data: held-out preferences to measure loss, margins and accuracy on; None: no measurement.
      plain_text: prompts and answers that are strings are texts to be continued, not messages of a chat.
      preference: the loss and its numbers.
      seq_len: tokens in a row. Pairs are packed into rows.
      max_length: tokens of a prompt and its answer; longer texts are cut at their end. None: half of seq_len, because a row
        holds both texts of a pair; for kto seq_len.
      batch_size: packed rows, not pairs, in an optimizer step, over all micro-batches. A row holds the pairs that fit; the log
        counts the pairs of each step.
      learning_rate: the peak, reached after `warmup_steps`; afterwards the rate falls along a cosine. None: 1e-6, and 1e-5
        with lora.
      seed: decides the order of examples, and the initial adapters.
      dry_run: check everything, and print the data and its first example. Train nothing, read no weights, write no file.
    """

    data: str
    eval_every: int = 50
    plain_text: bool = False
    preference: PreferenceSettings = PreferenceSettings()
    max_length: int | None = None
    steps: int = 500
    weight_decay: float = 0.0
    checkpoint_every: int = 100

    PEAKS: ClassVar[tuple[float, float]] = (1e-6, 1e-5)
    """Preferences need less than fine-tuning."""
    RESUME_MUST_MATCH = ("plain_text", "max_length", *RunSettings.RESUME_MUST_MATCH)
    WANTED = {**RunSettings.WANTED, "data": "a string that is not empty", "seq_len": "an integer of at least 4"}

    def problems(self) -> list[str]:
        """Adds to the problems of `RunSettings`: files that do not exist."""
        return super().problems() + file_problems(self.output, self.data, self.eval_data)

    def pipe_problems(self, ranks: int) -> list[str]:
        """Refuses a pipe."""
        if ranks == 1:
            return []
        return [
            f"mesh.pipe={ranks} needs a loss of single tokens, as finetune's: a preference loss compares whole answers, and "
            "ranks of a pipe compute the losses of parts of a sequence; use a mesh without pipe"
        ]
