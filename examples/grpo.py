"""Teach a model by rewards (GRPO), in your own loop: copy this file and edit it.

    make demo
    python examples/grpo.py --model runs/demo/model --output runs/valid_python

The model gets the first line of a function and writes its body. An answer is worth 1 if it ends in time, is valid Python, and
has three different lines. Without the last rule the model learns to write `pass`. It takes some minutes on two CPU cores.
`moe-jax grpo` adds resuming, a journal and metrics files.
"""

import ast
import inspect
import shutil
import textwrap
from dataclasses import dataclass
from itertools import count, islice

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import moe_jax
from moe_jax import reinforcement, train
from moe_jax.serving import EngineLimits


@dataclass
class Settings:
    """Command-line options."""

    model: str
    output: str
    prompts: int = 16
    samples: int = 8
    max_new_tokens: int = 64
    steps: int = 60
    learning_rate: float = 2e-4


def valid_python(prompts, completions, finish_reasons, **_):
    """The reward: answers that end, parse, and have three lines that differ."""
    rewards = []
    for prompt, text, reason in zip(prompts, completions, finish_reasons, strict=True):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        try:
            ast.parse(prompt + text)
        except (SyntaxError, ValueError):
            lines = []
        rewards.append(float(reason == "stop" and len(lines) >= 3 and len(set(lines)) == len(lines)))
    return rewards


def first_lines():
    """The first lines of functions of the standard library."""
    functions = [each for module in (inspect, shutil, textwrap, ast) for each in vars(module).values()]
    names = {each.__name__: list(inspect.signature(each).parameters) for each in functions if inspect.isfunction(each)}
    return [{"prompt": f"def {name}({', '.join(arguments)}):"} for name, arguments in names.items()]


def main(settings: Settings) -> None:
    """Loads the model, draws, scores and learns, saves the model."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model, tokenizer = moe_jax.from_pretrained(settings.model, dtype=dtype), moe_jax.load_tokenizer(settings.model)
    length = settings.max_new_tokens + 64
    policy = reinforcement.Policy(
        model,
        train.make_optimizer(settings.learning_rate, weight_decay=0.0),
        reinforcement.PolicySettings(samples=settings.samples, max_new_tokens=settings.max_new_tokens),
        tokenizer=tokenizer,
        limits=EngineLimits(max_sequences=settings.prompts * settings.samples, max_length=length, num_pages=1024),
        rows=16,
    )
    rows = first_lines()
    order, keys = np.random.default_rng(0).permutation(len(rows)), count()
    for step in range(1, settings.steps + 1):
        # A prompt's key names its random numbers: the same run draws the same answers.
        prompts = [(key, rows[order[key % len(rows)]]) for key in islice(keys, settings.prompts)]
        groups = reinforcement.score(policy.sample(prompts, step=step, seed=0), [valid_python])
        metrics = policy.update(groups)
        reward = np.mean([group.rewards for group in groups])
        tokens = np.mean([len(sample.tokens) for group in groups for sample in group.samples])
        print(f"step {step}: reward {reward:.3f}, {tokens:.0f} tokens an answer, entropy {metrics['entropy']:.2f}", flush=True)
    best = max((sample for group in groups for sample in group.samples), key=lambda sample: len(sample.text))
    print(best.text)
    policy.close()
    moe_jax.save_pretrained(policy.model, settings.output, tokenizer_from=settings.model)
    print(f"wrote {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
