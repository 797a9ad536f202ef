"""The training run that test_resume starts as a process of its own, to be killed. Arguments: data folder, output folder."""

import sys

import tiny

from moe_jax.recipes import FinetuneSettings, finetune

if __name__ == "__main__":
    settings = FinetuneSettings(
        model="none", data=sys.argv[1], output=sys.argv[2], seq_len=32, batch_size=4, gradient_accumulation=2, steps=24,
        learning_rate=1e-2, warmup_steps=2, checkpoint_every=5, keep_checkpoints=2, dtype="float32", seed=7,
    )  # fmt: skip
    finetune(settings, model=tiny.biased_model(), tokenizer=tiny.tokenizer())
