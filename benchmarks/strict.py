"""Compares bits of an engine with `strict=True` to those of whole sequences, and its time to an engine's without.

    python benchmarks/strict.py                        # 4 layers of Qwen3-30B-A3B in bf16
    python benchmarks/strict.py --layers 48 --cases 16 256

Each case is a number of prompts at once, of different lengths. Each engine computes prompts in chunks of another size. A row
says how many log-probabilities, of prompts and of drawn tokens, differ from `strict_log_probs` of the sequence. 0 is right.
A step's time, strict and not, is the difference between generating `--long` and 16 tokens; medians of 3 calls.
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.config import NAMED_CONFIGS
from moe_jax.models.random_weights import random_model
from moe_jax.serving.engine import Engine
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.strict_log_probs import strict_log_probs

SHORT = 16


def main() -> None:
    """Prints a row for each engine and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048], help="tokens of the largest step")
    parser.add_argument("--prompt", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--long", type=int, default=144)
    args = parser.parse_args()
    config = replace(NAMED_CONFIGS["qwen3-30b-a3b"].without_mtp(), num_hidden_layers=args.layers)
    model = random_model(config, jnp.bfloat16)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.layers} layers of qwen3-30b-a3b")
    whole = partial(compiled_log_probs(nnx.graphdef(model)), nnx.state(model))
    lengths = np.random.default_rng(0).integers(1, args.prompt + 1, max(args.cases))
    prompts = [np.random.default_rng(i).integers(0, config.vocab_size, length).tolist() for i, length in enumerate(lengths)]
    for step_tokens in args.chunks:
        for strict in (False, True):
            limits = EngineLimits(
                max_sequences=max(args.cases),
                max_tokens_per_step=step_tokens,
                max_length=args.prompt + args.long,
                num_pages=1 + max(args.cases) * pages_of(args.prompt + args.long),
            )
            engine = Engine(model, limits=limits, strict=strict)
            for count in args.cases:
                wrong = wrong_bits(engine, whole, prompts[:count], args.prompt + SHORT)
                took = 1e3 * step_time(engine, prompts[:count], args.long)
                name = "strict" if strict else "not strict"
                print(f"{name:>10}, steps of {step_tokens:5}, {count:4} prompts: {wrong}, {took:7.3f} ms a step", flush=True)
            engine.close()


def compiled_log_probs(graphdef: nnx.GraphDef):
    """Returns `strict_log_probs` of (state, tokens, segment_ids), compiled. As constants, weights would take minutes."""
    return jax.jit(lambda state, tokens, segment_ids: strict_log_probs(nnx.merge(graphdef, state), tokens, segment_ids))


def wrong_bits(engine: Engine, whole, prompts: list[list[int]], longest: int) -> str:
    """Returns the number of log-probabilities that differ from those of whole sequences, and the largest difference."""
    options = SamplingOptions(max_new_tokens=SHORT, ignore_eos=True, temperature=1.0, seed=0, logprobs=0, prompt_logprobs=0)
    differ, total, largest = 0, 0, 0.0
    for prompt, (one,) in zip(prompts, engine.generate(prompts, options), strict=True):
        tokens = prompt + one.tokens
        padded = np.zeros((1, longest), np.int32)
        padded[0, : len(tokens)] = tokens
        expected = np.asarray(whole(padded, (np.arange(longest)[None] < len(tokens)).astype(np.int32)))[0, : len(tokens) - 1]
        scores = zip(one.prompt_logprobs[1:], prompt[1:], strict=True)
        found = np.float32([of_place[token] for of_place, token in scores] + one.logprobs)
        differ, total = differ + int((found != expected).sum()), total + len(found)
        largest = max(largest, float(np.abs(found - expected).max()))
    return f"{differ:6} of {total:6} differ, by at most {largest:.1e}"


def step_time(engine: Engine, prompts: list[list[int]], long: int) -> float:
    """Returns the seconds of a step that gives each sequence a token."""

    def seconds(new_tokens: int) -> float:
        options = SamplingOptions(max_new_tokens=new_tokens, ignore_eos=True)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            engine.generate(prompts, options)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return (seconds(long) - seconds(SHORT)) / (long - SHORT)


if __name__ == "__main__":
    main()
