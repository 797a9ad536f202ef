"""A run of reinforcement learning with a policy that draws without a model: `python -m tests.helpers.run_grpo output`.

The reward appends the seeds of each call to a file, on the disk before it returns.
"""

import json
import os
import sys
from pathlib import Path

from moe_jax.recipes import GrpoSettings, grpo
from moe_jax.recipes.grpo import loop
from tests.helpers import tiny
from tests.helpers.fake_policy import FakePolicy

STEPS, PROMPTS = 6, 3


def run(output: Path, seconds: float = 0.0):
    """Trains the tiny dense model in `output`; `seconds` is the time of a group and of an update."""
    loop.Policy = FakePolicy
    FakePolicy.seconds = seconds
    asked = output.with_suffix(".asked")

    def noted(completions, seeds, **columns):
        handle = os.open(asked, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{json.dumps(list(map(int, seeds)))}\n".encode())
        os.close(handle)
        return [(seed % 5) / 5 for seed in seeds]

    data = output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"prompt": f"prompt {i}:"}) + "\n" for i in range(7)))
    settings = GrpoSettings(
        model="none", data=str(data), output=str(output), prompts=PROMPTS, samples=4, max_new_tokens=6, steps=STEPS,
        seq_len=64, dtype="float32", checkpoint_every=2,
    )  # fmt: skip
    return grpo(settings, rewards=[noted], model=tiny.dense(), tokenizer=tiny.tokenizer())


if __name__ == "__main__":
    run(Path(sys.argv[1]), 0.02)
