"""Train adapters on attention and all experts of Qwen3-30B-A3B, on one H100 or H200 of 80 GB or more.

    python examples/lora_30b.py --data chats.jsonl --output runs/lora
    python examples/lora_30b.py --data chats.jsonl --output runs/lora --weights nf4 --rows 1 --seq-len 2048     # 24 GB
    moe-jax chat runs/lora

The weights, 57 GiB in bf16, are frozen; a step of 8 x 4096 tokens needs 72 GiB in all (docs/adapters.md). The adapter goes to
`output`/adapter, for PEFT, vLLM and SGLang too. The same command continues an interrupted run from the last checkpoint.
"""

from dataclasses import dataclass

import tyro

from moe_jax import recipes
from moe_jax.adapters import LoraSettings
from moe_jax.models.precision import Weights
from moe_jax.recipes.run.folder import export


@dataclass
class Settings:
    """Command-line options."""

    data: str
    output: str
    model: str = "Qwen/Qwen3-30B-A3B"
    weights: Weights = "whole"
    rank: int = 32
    steps: int = 1000
    seq_len: int = 4096
    rows: int = 8
    learning_rate: float = 1e-4


def main(settings: Settings) -> None:
    """Trains; the adapter is written to `output`/adapter."""
    run = recipes.FinetuneSettings(
        model=settings.model,
        data=settings.data,
        output=settings.output,
        seq_len=settings.seq_len,
        batch_size=settings.rows,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        lora=LoraSettings(rank=settings.rank),
        weights=settings.weights,
    )
    result = recipes.finetune(run)
    if result.step < settings.steps:
        raise SystemExit(143)  # told to stop, and saved: the same command resumes from there
    export(result.model, run)


if __name__ == "__main__":
    main(tyro.cli(Settings))
