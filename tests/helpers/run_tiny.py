"""The training run of test_resume, also as a process of its own, to be killed: `python -m tests.helpers.run_tiny data output`.

Its steps have no passes. In a process of its own each takes a third of a second.
"""

import sys
import time
from pathlib import Path

import pytest

from moe_jax.recipes import FinetuneSettings, finetune
from tests.helpers import steps_without_passes, tiny


def run(data: Path, output: Path) -> None:
    """Trains for 24 steps, or resumes up to them."""
    settings = FinetuneSettings(
        model="none", data=str(data), output=str(output), seq_len=32, batch_size=4, steps=24, warmup_steps=2,
        checkpoint_every=5, keep_checkpoints=2, dtype="float32", seed=7,
    )  # fmt: skip
    finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())


def slow_step(state, batch):
    time.sleep(0.3)
    return steps_without_passes.add(state, batch)


if __name__ == "__main__":
    steps_without_passes.put_in_place(pytest.MonkeyPatch(), slow_step)
    run(*map(Path, sys.argv[1:]))
