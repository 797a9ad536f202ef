"""Times decoding with latent attention: a cache of latents compared with a cache of every head's keys and values.

    python benchmarks/decode_cache.py                              # 4 layers of DeepSeek-V3, bf16: about 60 GiB of GPU memory
    python benchmarks/decode_cache.py --batch 64 --context 16384 --systems latents --output results.json
    python benchmarks/decode_cache.py --small                      # sizes for a CPU, in f32, as a smoke test

Both have the same random weights. The cache holds `--context` random tokens of each of `--batch` sequences. Each call decodes
`--steps` more tokens, one after another and greedily. Times are medians of `--runs` calls after a first call. *cache* is the
size of the cache; *peak* is the memory of a call with weights and cache, as the compiler reports it. First both decode a few
tokens after short prompts: their logits must agree, or the process exits with 1. `--systems` with one name skips this check.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.config import NAMED_CONFIGS, DeepseekV3Config
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.layers.latent_attention import LatentAttention, expand
from moe_jax.models.deepseek_v3 import DeepseekV3
from moe_jax.models.random_weights import random_model

SMALL = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_attention_heads=8,
    num_key_value_heads=8, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, initializer_range=0.1,
)  # fmt: skip

TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-5}
"""Largest accepted difference of logits, relative in the Frobenius norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedConfig(DeepseekV3Config):
    """The same model with a cache of keys and values."""

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a cache without latents."""
        heads = self.num_key_value_heads
        return (heads, self.mixer.key_dim), (heads, self.mixer.value_dim)


class ExpandedAttention(LatentAttention):
    """Latent attention that expands the keys and values of its tokens and caches them."""

    def __call__(self, x, rope, attend):
        """Computes attention, like `LatentAttention`."""
        kept = expand(self.config, self.kv_b_proj.weight[...], self.latents(x, rope))
        out, cache = attend(self.queries(x, rope), kept, scale=self.scale)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), cache


class ExpandedDeepseekV3(DeepseekV3):
    """DeepSeek-V3 with `ExpandedAttention`."""

    def _attention(self, *, stack, param_dtype, rngs):
        return ExpandedAttention(self.config, stack=stack, param_dtype=param_dtype, rngs=rngs)


def main() -> None:
    """Prints a row for each system; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="the first three are dense")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--systems", nargs="+", choices=("latents", "expanded"), default=["latents", "expanded"])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, in f32, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    config = dataclasses.replace(NAMED_CONFIGS["deepseek-v3"], num_hidden_layers=args.layers)
    if args.small:
        args.dtype, args.batch, args.context, args.steps, args.runs = "float32", 2, 64, 4, 2
        config = dataclasses.replace(config, **SMALL)
    assert isinstance(config, DeepseekV3Config)

    model = random_model(config, jnp.dtype(args.dtype))
    graph, weights = nnx.split(model)
    expanded = ExpandedConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    abstract = nnx.eval_shape(lambda: ExpandedDeepseekV3(expanded, dtype=jnp.dtype(args.dtype), rngs=nnx.Rngs(0)))
    systems = {"latents": (config, graph), "expanded": (expanded, nnx.split(abstract)[0])}
    systems = {name: system for name, system in systems.items() if name in args.systems}

    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {args.layers} layers, {args.batch} x {args.context} tokens cached, {args.dtype}")
    error = difference_of_logits(systems, weights, args.dtype) if len(systems) == 2 else None
    print(f"{'cache':<10} {'tokens/s':>9} {'ms/step':>9} {'cache GiB':>10} {'peak GiB':>9} {'bytes/token':>12}", flush=True)
    rows = []
    for name, (of_system, graph) in systems.items():
        row = measure(of_system, graph, weights, args)
        times = f"{row['tokens_per_s']:>9.0f} {row['step_ms']:>9.3f}"
        print(f"{name:<10} {times} {row['cache_gib']:>10.3f} {row['peak_gib']:>9.2f} {row['bytes_per_token']:>12}", flush=True)
        rows.append({"system": name} | row)
    if error is not None:
        print(f"difference of logits: {error:.1e}")
    if args.output is not None:
        setting = vars(args) | {"output": str(args.output), "device": device, "jax": jax.__version__}
        args.output.write_text(json.dumps({"setting": setting, "difference": error, "rows": rows}, indent=1) + "\n")
    # A comparison with NaN is false.
    if error is not None and not error < TOLERANCE[args.dtype]:
        sys.exit(1)


def measure(config, graph, weights, args: argparse.Namespace) -> dict[str, float]:
    """Measures decoding after a full cache, which is donated to each call and returned."""
    cache = random_cache(config, args.batch, args.context, args.steps, jnp.dtype(args.dtype))
    size = sum(a.nbytes for a in cache.kept)

    def decode(weights, token, cache):
        model = nnx.merge(graph, weights)

        def step(carry, _):
            token, cache = carry
            token, cache = next_token(model, token, cache)
            return (token, cache), None

        (token, cache), _ = jax.lax.scan(step, (token, cache), length=args.steps)
        # The next call writes over the same rows.
        return token, dataclasses.replace(cache, written=cache.length - args.steps)

    token = jnp.ones((args.batch, 1), jnp.int32)
    run = jax.jit(decode, donate_argnums=2).lower(weights, token, cache).compile()
    memory, seconds = run.memory_analysis(), []
    for _ in range(args.runs + 1):
        began = time.perf_counter()
        token, cache = jax.block_until_ready(run(weights, token, cache))
        seconds.append((time.perf_counter() - began) / args.steps)
    of_step = statistics.median(seconds[1:])
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {
        "tokens_per_s": args.batch / of_step,
        "step_ms": 1e3 * of_step,
        "cache_gib": size / 2**30,
        "peak_gib": peak / 2**30,
        "bytes_per_token": size // (args.batch * (args.context + args.steps)),
    }


def random_cache(config, batch: int, context: int, steps: int, dtype) -> KVCache:
    """Returns a cache filled with random data, with room for `steps` tokens. Times do not depend on the data."""

    @jax.jit
    def make():
        cache = init_cache(config, batch, context + steps, dtype)
        kept = tuple(jax.random.normal(jax.random.key(i), a.shape, dtype) for i, a in enumerate(cache.kept))
        segment_ids = jnp.broadcast_to(jnp.arange(context + steps) < context, cache.segment_ids.shape).astype(jnp.int32)
        return KVCache(kept, segment_ids, jnp.int32(context))

    return make()


def next_token(model: DeepseekV3, token, cache: KVCache):
    """Returns the most likely token after `token`, and the cache with `token` in it."""
    positions = jnp.broadcast_to(cache.length, token.shape)
    states = model.hidden_states(token, positions, jnp.ones_like(token), cache=cache)
    logits = jnp.einsum("bsd,vd->bsv", states.hidden, model.head_weight.astype(model.dtype))
    return logits.argmax(-1).astype(jnp.int32), states.cache


def difference_of_logits(systems, weights, dtype: str) -> float:
    """Returns the relative difference of logits between two systems, which use the same experts.

    They compare the logits of a prompt of 16 tokens and of 4 tokens decoded after it.
    """
    first, second = systems.values()
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, first[0].vocab_size)
    parts = tokens[:, :16], *jnp.split(tokens[:, 16:], 4, axis=1)

    def logits(config, graph, weights, replay):
        model, cache = nnx.merge(graph, weights), init_cache(config, 2, 32, jnp.dtype(dtype))
        found, chosen = [], []
        for part, expert_ids in zip(parts, replay, strict=True):
            positions = jnp.broadcast_to(cache.length + jnp.arange(part.shape[1]), part.shape)
            output = model(part, positions, cache=cache, expert_ids=expert_ids)
            found.append(output.logits.astype(jnp.float32))
            chosen.append(output.expert_ids)
            cache = output.cache
        return jnp.concatenate(found, axis=1), chosen

    run = jax.jit(logits, static_argnums=(0, 1))
    of_first, chosen = run(*first, weights, [None] * len(parts))
    of_second, _ = run(*second, weights, chosen)
    return float(jnp.linalg.norm((of_first - of_second).reshape(-1)) / jnp.linalg.norm(of_second.reshape(-1)))


if __name__ == "__main__":
    main()
