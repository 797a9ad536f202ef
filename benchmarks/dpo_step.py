"""Times a DPO step with adapters against two steps of fine-tuning, of the chosen and of the rejected answers' tokens.

    python benchmarks/dpo_step.py --layers 4 8 --rows 8 --seq 4096
    python benchmarks/dpo_step.py --small                                      # CPU

Rows hold a pair each, both answers of half a row, in fine-tuning as two documents. The ratio is (DPO step) / (two steps of half
the rows each). "stored" is a DPO step whose batch holds the reference's log-probabilities. With two numbers of layers a line
through both gives the ratio of all layers of the config: a prediction.
"""

import argparse
import gc
import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.models.random_weights import random_model
from moe_jax.preferences import Preference, PreferenceSettings
from moe_jax.train import NextToken, init_state, make_optimizer, make_train_step, put_batch

SMALL = dict(
    vocab_size=512, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32,
    num_experts=16, num_experts_per_tok=4,
)  # fmt: skip


def main() -> None:
    """Prints a line for each number of layers, and the prediction for all layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=tuple(NAMED_CONFIGS))
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument("--own-routing", action="store_true", help="the router's choice; default: every expert has equal load")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, as a smoke test")
    args = parser.parse_args()
    config = NAMED_CONFIGS[args.config]
    if args.small:
        config, args.layers, args.rows, args.seq = replace(config, **SMALL), [1, 2], 2, 64
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.config}, {args.rows} x {args.seq} tokens")
    found = {}
    for layers in args.layers:
        found[layers] = measure(args, replace(config, num_hidden_layers=layers))
        show(f"{layers} layers", found[layers])
        gc.collect()
    if len(args.layers) > 1:
        first, *_, last = args.layers
        of_layer = {name: (found[last][name] - found[first][name]) / (last - first) for name in found[last]}
        total = NAMED_CONFIGS[args.config].num_hidden_layers
        predicted = {name: found[first][name] + (total - first) * seconds for name, seconds in of_layer.items()}
        show(f"{total} layers (predicted)", predicted)


def show(title: str, seconds: dict[str, float]) -> None:
    """Prints the times in ms, and the ratios."""
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    two = 2 * seconds["half"]
    ratios = ", ".join(f"{name} / two of half the rows {seconds[name] / two:.3f}" for name in ("dpo", "stored"))
    print(f"{title}: {times}; {ratios}; dpo / sft of all rows {seconds['dpo'] / seconds['sft']:.3f}", flush=True)


def measure(args: argparse.Namespace, config: ModelConfig) -> dict[str, float]:
    """Returns the median seconds of the steps: dpo, stored, sft (of all rows), half (sft of half the rows)."""
    batch = pairs(args.rows, args.seq, config.vocab_size)
    stored = batch | {"reference_log_probs": np.full((args.rows, 1, 2), -100, np.float32)}
    half = {name: array[: args.rows // 2] for name, array in batch.items()}
    dpo = Preference(PreferenceSettings("dpo"))
    steps = {"dpo": (dpo, batch), "stored": (dpo, stored), "sft": (NextToken(), batch), "half": (NextToken(), half)}
    model = random_model(config, jnp.bfloat16, param_dtype=jnp.bfloat16)
    add_lora(model, LoraSettings(rank=args.rank), rngs=nnx.Rngs(0))
    optimizer = make_optimizer(1e-5)
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    del model
    options = dict(remat=not args.no_remat, force_balanced_routing=not args.own_routing)
    found = {}
    for name, (objective, rows) in steps.items():
        step, placed, seconds = make_train_step(graph, optimizer, objective, **options), put_batch(rows, state.params), []
        for _ in range(args.steps + 2):
            began = time.perf_counter()
            state, metrics = step(state, placed)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(seconds[2:])
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        print(f"  {name}: loss {float(metrics['loss']):.4f}, peak so far {peak / 2**30:.1f} GiB", flush=True)
    return found


def pairs(rows: int, seq: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns rows of two texts of random tokens each; the second half of each text is learned."""
    half, shape = seq // 2, (rows, seq)
    index = np.broadcast_to(np.arange(seq), shape)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape)
    positions = index % half
    return {
        "tokens": tokens.astype(np.int32),
        "labels": np.roll(tokens, -1, axis=1).astype(np.int32),
        "loss_mask": ((positions >= half // 2) & (positions < half - 1)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": (1 + index // half).astype(np.int32),
        "example": np.arange(rows, dtype=np.int32)[:, None],
    }


if __name__ == "__main__":
    main()
