"""Trains a small MoE from scratch on real text with experts in bf16 and in FP8, and compares the losses.

    python benchmarks/fp8_loss.py --output results/                         # one GPU: two seeds each, 2000 steps
    python benchmarks/fp8_loss.py --small --steps 20                        # on a CPU, as a smoke test

The text is the source code of the installed Python packages, as bytes; every 50th file is held out. A seed decides the random
weights and the order of the text, and both precisions have both. The learning rate decays to zero. The gap of a step is that of
the means over seeds, relative; it is compared with the spread of the seeds themselves.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.runtime.files import save_png
from moe_jax.train import (
    LossWeights,
    NextToken,
    init_state,
    make_evaluation,
    make_optimizer,
    make_train_step,
    put_batch,
    warmup_cosine,
)

BYTES = 256
HELD_OUT_EVERY = 50
HELD_OUT_BATCHES = 32
STEPS_OF_A_POINT = 20
"""Steps whose mean loss is one point of a curve."""


def main() -> None:
    """Prints a line for each run and the gaps; with --output also writes fp8_loss.json and fp8_loss.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8", "fp8_kept"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--megabytes", type=float, default=40, help="of text at most")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--output", type=Path, help="a folder for fp8_loss.json and fp8_loss.png")
    args = parser.parse_args()
    if args.small:
        args.rows, args.seq, args.layers, args.hidden, args.intermediate, args.experts, args.megabytes = (
            4,
            64,
            2,
            128,
            128,
            4,
            1,
        )
        args.top_k = 2
    learned, held_out = python_sources(int(args.megabytes * 1e6))
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {len(learned) / 1e6:.1f} MB of text, {len(held_out) / 1e6:.1f} MB held out")
    runs = []
    for seed in args.seeds:
        for precision in args.precisions:
            run = train(args, precision, seed, learned, held_out)
            runs.append(run)
            print(
                f"{precision:>8}, seed {seed}: last loss {run['losses'][-1]:.4f}, held out {run['held_out']:.4f}, "
                f"{run['seconds']:.0f} s",
                flush=True,
            )
    gaps = gaps_of(runs, args.precisions)
    for name, gap in gaps.items():
        print(f"{name}: {gap}")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        found = {"device": device, "jax": jax.__version__, "settings": settings, "gaps": gaps, "runs": runs}
        (args.output / "fp8_loss.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(runs, args.output / "fp8_loss.png")


def python_sources(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of Python files, shuffled: those to learn, at most `limit`, and those held out."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    np.random.default_rng(0).shuffle(files)
    texts: list[bytes] = []
    size = 0
    for path in files:
        if size >= limit:
            break
        texts.append(path.read_bytes())
        size += len(texts[-1])
    held_out = b"".join(texts[::HELD_OUT_EVERY])
    learned = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT_EVERY)
    return np.frombuffer(learned, np.uint8), np.frombuffer(held_out, np.uint8)


def train(args: argparse.Namespace, precision: str, seed: int, learned: np.ndarray, held_out: np.ndarray) -> dict:
    """Returns the mean losses of each `STEPS_OF_A_POINT` steps, and the loss on text held out."""
    config = moe_jax.Qwen3MoeConfig(
        vocab_size=BYTES,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        head_dim=64,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        max_position_embeddings=args.seq,
    )
    model = moe_jax.from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(seed))
    model.set_precision(precision)
    schedule = warmup_cosine(args.learning_rate, steps=args.steps, warmup_steps=None, min_ratio=0.0)
    optimizer = make_optimizer(schedule)
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    step = make_train_step(graph, optimizer, NextToken(LossWeights(aux_loss_coef=1e-2)), remat=False)
    evaluate = make_evaluation(graph)
    rng = np.random.default_rng(seed)
    began, losses = time.perf_counter(), []
    for _ in range(args.steps):
        state, metrics = step(state, put_batch(batch_of(rng, learned, args), state.params))
        losses.append(metrics["loss"])
    losses = np.asarray(jax.device_get(losses), np.float64)
    seconds = time.perf_counter() - began
    of_held_out = np.random.default_rng(0)
    batches = [put_batch(batch_of(of_held_out, held_out, args), state.params) for _ in range(HELD_OUT_BATCHES)]
    points = [float(part.mean()) for part in np.array_split(losses, max(1, args.steps // STEPS_OF_A_POINT))]
    return {
        "precision": precision,
        "seed": seed,
        "losses": points,
        "held_out": evaluate(state, batches),
        "seconds": seconds,
        "finite": bool(np.isfinite(losses).all()),
    }


def batch_of(rng: np.random.Generator, text: np.ndarray, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Returns random windows of the text."""
    starts = rng.integers(0, len(text) - args.seq, args.rows)
    windows = text[starts[:, None] + np.arange(args.seq + 1)].astype(np.int32)
    ones = np.ones((args.rows, args.seq), np.int32)
    positions = np.broadcast_to(np.arange(args.seq, dtype=np.int32), ones.shape)
    return {
        "tokens": windows[:, :-1],
        "labels": windows[:, 1:],
        "loss_mask": ones,
        "positions": positions,
        "segment_ids": ones,
    }


def gaps_of(runs: list[dict], precisions: list[str]) -> dict[str, dict[str, float]]:
    """Returns for each precision after the first its relative gap to the first, and the relative spread of the seeds."""

    def of(precision: str, value) -> np.ndarray:
        return np.array([value(run) for run in runs if run["precision"] == precision])

    values = {
        "last tenth": lambda run: float(np.mean(run["losses"][-max(1, len(run["losses"]) // 10) :])),
        "held out": lambda run: run["held_out"],
    }
    base, *others = precisions
    return {
        f"{precision} beside {base}, {name}": {
            "gap": float(of(precision, value).mean() / of(base, value).mean() - 1),
            "spread of seeds": float(np.ptp(of(base, value)) / of(base, value).mean()),
        }
        for precision in others
        for name, value in values.items()
    }


def plot(runs: list[dict], path: Path) -> None:
    """Plots the losses, and below the difference of each run from the first precision's run of the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    base = {run["seed"]: run for run in runs if run["precision"] == runs[0]["precision"]}
    for run in runs:
        steps = STEPS_OF_A_POINT * (1 + np.arange(len(run["losses"])))
        label = f"{run['precision']}, seed {run['seed']}"
        upper.plot(steps, run["losses"], label=label, linewidth=1)
        if run is not base[run["seed"]]:
            lower.plot(steps, 100 * (np.array(run["losses"]) / base[run["seed"]]["losses"] - 1), label=label, linewidth=1)
    upper.set(ylabel="cross-entropy a byte", yscale="log")
    lower.set(xlabel="step", ylabel=f"% from {runs[0]['precision']}")
    lower.axhline(0, color="black", linewidth=0.5)
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.legend()
    save_png(figure, path)


if __name__ == "__main__":
    main()
