"""Compares the first call of `moe_jax.generate` with an engine built for one prompt: most of both is compiling.

    python benchmarks/first_call.py --layers 16 48

The model has random weights and Qwen3-MoE's layers at a small width. So a CPU can run it, and compile times are near to those
of wide layers.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.models.decoder import Decoder
from moe_jax.models.random_weights import random_model
from moe_jax.serving import Engine, EngineLimits, SamplingOptions

PROMPT = list(range(1, 51))
NEW_TOKENS = 64
# One decode program, and the fewest programs for chunks: with and without decoding rows.
LIMITS = EngineLimits(
    max_sequences=1, max_tokens_per_step=128, max_chunks_per_step=1, max_length=128, num_pages=3, max_waiting=1
)


def main() -> None:
    """Prints a line for each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, a prompt of {len(PROMPT)} tokens, {NEW_TOKENS} new ones")
    sizes = dict(vocab_size=512, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes |= dict(moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4)
    for layers in args.layers:
        config = replace(NAMED_CONFIGS["qwen3-30b-a3b"], **sizes, num_hidden_layers=layers)
        print(f"{layers} layers: {compared(random_model(config, jnp.float32))}", flush=True)


def compared(model: Decoder) -> str:
    """Returns the seconds of `generate` and of an engine, in their first call and in a later one."""
    first, tokens = timed(lambda: moe_jax.generate(model, PROMPT, max_new_tokens=NEW_TOKENS))
    later, _ = timed(lambda: moe_jax.generate(model, PROMPT, max_new_tokens=NEW_TOKENS))
    start, engine = timed(lambda: Engine(model, limits=LIMITS))
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    call, ((completion,),) = timed(lambda: engine.generate([PROMPT], options))
    engine.close()
    same = "the same" if completion.tokens == tokens else "OTHER"
    return f"generate {first:.1f} s, later {later:.1f} s; engine {start:.1f} s, then {call:.1f} s; {same} tokens"


def timed[T](function: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds of a call, and its result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


if __name__ == "__main__":
    main()
