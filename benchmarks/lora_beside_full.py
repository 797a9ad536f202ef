"""Draws the loss of adapters beside the loss of all parameters, both fine-tuned from one base on the demo's chats.

    python benchmarks/lora_beside_full.py --output runs/lora_beside_full --picture docs/lora_loss.png      # CPU, ten minutes

The base is the demo's small Qwen3-MoE, trained on functions of Python's standard library. Fine-tuning asks for other functions
by their names. Held-out chats measure both runs.
"""

import argparse
import json
from pathlib import Path

from flax import nnx
from matplotlib.figure import Figure

from moe_jax.adapters import LoraSettings
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.demo.run import small_config
from moe_jax.demo.text import as_chat, library_functions, train_tokenizer
from moe_jax.models.auto import from_config
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.recipes.run.folder import export
from moe_jax.runtime.files import save_png
from moe_jax.train.metrics import read_records
from moe_jax.train.plots import SMOOTHING_STEPS, moving_average

CHATS, HELD_OUT = 2000, 200
"""The numbers of functions for fine-tuning and for its held-out loss; the base learns all others."""
VOCAB_SIZE = 1024


def main() -> None:
    """Trains the base and both runs, as far as their folders do not hold them, and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/lora_beside_full"))
    parser.add_argument("--picture", type=Path, default=Path("lora_loss.png"))
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3, help="of all parameters")
    parser.add_argument("--lora-rate", type=float, default=1e-2)
    options = parser.parse_args()
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    base = trained_base(output, options.base_steps)
    runs = {
        "all parameters": dict(learning_rate=options.rate),
        f"adapters of rank {options.rank}": dict(learning_rate=options.lora_rate, lora=LoraSettings(rank=options.rank)),
    }
    records = {}
    for name, changes in runs.items():
        settings = settings_of(output, name.split()[0], str(base), "chats", options.steps, **changes)
        finetune(settings)
        records[name] = read_records(Path(settings.output) / "metrics.jsonl")
    draw(records, options.picture)


def trained_base(output: Path, steps: int) -> Path:
    """Writes the data, and trains the base on those functions that no chat asks for; returns its folder."""
    functions = library_functions()
    of_chats, of_base = functions[: CHATS + HELD_OUT], functions[CHATS + HELD_OUT :]
    write(output / "text.jsonl", [{"text": text} for text in of_base])
    write(output / "chats.jsonl", [as_chat(text) for text in of_chats[:CHATS]])
    write(output / "held_out.jsonl", [as_chat(text) for text in of_chats[CHATS:]])
    settings = settings_of(output, "base", str(output / "initial"), "text", steps, learning_rate=5e-3)
    if not (folder := Path(settings.output) / "model").is_dir():
        tokenizer = train_tokenizer(functions, VOCAB_SIZE)
        tokenizer.save_pretrained(output / "tokenizer")
        model = from_config(small_config("qwen3_moe", len(tokenizer), 0), rngs=nnx.Rngs(0))
        save_pretrained(model, output / "initial", tokenizer_from=output / "tokenizer", progress=False)
        export(finetune(settings).model, settings)
    return folder


def settings_of(output: Path, name: str, model: str, data: str, steps: int, **changes) -> FinetuneSettings:
    """Returns a run's settings; only runs on chats measure a held-out loss."""
    held_out = {"eval_data": str(output / "held_out.jsonl"), "eval_every": 20} if data == "chats" else {}
    return FinetuneSettings(
        model=model, data=str(output / f"{data}.jsonl"), output=str(output / name), seq_len=128, batch_size=8, steps=steps,
        sequence_loss_coef=0.03, checkpoint_every=steps, dtype="float32", remat=False, **held_out, **changes,
    )  # fmt: skip


def write(file: Path, rows: list[dict]) -> None:
    """Writes rows of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw(records: dict[str, list[dict]], picture: Path) -> None:
    """Draws the training losses, smoothed, and the held-out losses as points."""
    figure = Figure(figsize=(6.4, 3.6), dpi=80, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for (name, of_run), color in zip(records.items(), ("tab:blue", "tab:orange"), strict=True):
        smooth = moving_average([record["loss"] for record in of_run], SMOOTHING_STEPS)
        axes.plot([record["step"] for record in of_run], smooth, color=color, label=name)
        measured = {record["step"]: record["eval_loss"] for record in of_run if "eval_loss" in record}
        axes.plot(list(measured), list(measured.values()), "o", color=color, markersize=4)
        print(f"{name}: held-out loss {list(measured.values())[-1]:.3f} after {of_run[-1]['step']} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, picture)


if __name__ == "__main__":
    main()
