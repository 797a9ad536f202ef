"""The training run of test_resume, also as a process of its own, to be killed.

Arguments: data folder, output folder, the name of a model in `tiny`, and the rank of adapters if they are trained.
"""

import sys
from pathlib import Path

from moe_jax.adapters import LoraSettings
from moe_jax.recipes import FinetuneSettings, finetune
from tests.helpers import tiny


def run(data: Path, output: Path, model: str, rank: int | str | None = None) -> None:
    """Trains for 24 steps, or resumes up to them."""
    settings = FinetuneSettings(
        model="none", data=str(data), output=str(output), seq_len=32, batch_size=4, gradient_accumulation=2, steps=24,
        learning_rate=1e-2, warmup_steps=2, checkpoint_every=5, keep_checkpoints=2, dtype="float32", seed=7,
        lora=None if rank is None else LoraSettings(rank=int(rank)),
    )  # fmt: skip
    finetune(settings, model=getattr(tiny, model)(), tokenizer=tiny.tokenizer())


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:3]), *sys.argv[3:])
