"""Tests if DeepSeek-V3's expert biases alone balance experts that start unbalanced, for several update rates of the biases.

    python benchmarks/balance.py --output runs/balance          # about 15 minutes on 2 CPU cores

Model and text are the demo's. The router's rows are scaled by 1 to 3, so that the experts with the longest rows start in the
top k of most tokens. No loss balances them. Prints and draws the load of the busiest expert over the mean, in each layer over
`--window` steps.
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moe_jax import from_config
from moe_jax.demo.run import small_config, write_json_lines
from moe_jax.demo.text import library_functions, train_tokenizer
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.train.metrics import read_records


def main() -> None:
    """Trains with each rate, prints a table and writes loads.json and balance.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0, 0.005], help="changes of a bias in one step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--window", type=int, default=25, help="number of steps whose loads are summed")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    texts = library_functions()
    write_json_lines(args.output / "text.jsonl", [{"text": text} for text in texts])
    tokenizer = train_tokenizer(texts, 1024)

    curves = {}
    for rate in args.rates:
        run = args.output / f"rate-{rate}"
        finetune(settings(args, run, rate), model=skewed_model(tokenizer), tokenizer=tokenizer)
        records = read_records(run / "expert_load.jsonl")
        curves[f"rate {rate}" if rate else "no biases"] = busiest_over_mean(
            np.array([record["expert_load"] for record in records]), args.window
        )
    (args.output / "loads.json").write_text(json.dumps({name: curve.tolist() for name, curve in curves.items()}) + "\n")
    draw(curves, args.window, args.output / "balance.png")
    print("busiest expert of the worst layer, over the mean, in the first and in the last window:")
    for name, curve in curves.items():
        print(f"  {name}: {curve[0].max():.2f}, {curve[-1].max():.3f}")


def skewed_model(tokenizer):
    """Returns the demo's DeepSeek-V3 with a router that prefers experts with higher numbers."""
    model = from_config(small_config("deepseek_v3", len(tokenizer), tokenizer.eos_token_id), rngs=nnx.Rngs(0))
    for stage in model.stages:
        if hasattr(stage.mlp, "router"):
            weight = stage.mlp.router.weight
            weight[...] = weight[...] * jnp.linspace(1, 3, weight.shape[1])[None, :, None]
    return model


def settings(args: argparse.Namespace, run: Path, rate: float) -> FinetuneSettings:
    """Returns the demo's settings, with biases as the only balancing."""
    return FinetuneSettings(
        model="none",
        data=str(args.output / "text.jsonl"),
        data_format="text",
        output=str(run),
        seq_len=128,
        batch_size=args.batch_size,
        steps=args.steps,
        learning_rate=3e-3,
        warmup_steps=args.steps // 10,
        checkpoint_every=args.steps,
        dtype="float32",
        remat=False,
        aux_loss_coef=0.0,
        sequence_loss_coef=0.0,
        expert_bias_update_rate=rate,
    )


def busiest_over_mean(loads: np.ndarray, window: int) -> np.ndarray:
    """Returns the busiest expert's load over the mean, [windows, layers], from loads [steps, layers, experts]."""
    whole = len(loads) // window * window
    sums = loads[:whole].reshape(-1, window, *loads.shape[1:]).sum(axis=1)
    return sums.max(axis=-1) / sums.mean(axis=-1)


def draw(curves: dict[str, np.ndarray], window: int, path: Path) -> None:
    """Draws a line for each run and layer."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="busiest expert / mean", title="Load of the experts of each layer")
    for (name, curve), color in zip(curves.items(), ("tab:gray", "tab:blue", "tab:green", "tab:orange"), strict=False):
        for layer, values in enumerate(curve.T):
            steps = window * np.arange(1, len(values) + 1)
            axes.plot(steps, values, color=color, linewidth=1.2, label=name if layer == 0 else None)
    axes.axhline(1.1, color="tab:red", linestyle=":", linewidth=1)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main()
