"""The report of a run: one HTML file with curves, samples, settings and versions, which opens offline."""

import base64
import json
import statistics
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_jax.recipes.run.folder import noted_settings
from moe_jax.recipes.run.run_log import SAMPLES
from moe_jax.runtime.files import save_png, write_text
from moe_jax.train.metrics import read_records
from moe_jax.train.plots import plot_run

REPORT = "report.html"

MOST_STEPS, MOST_SAMPLES = 100, 64
"""The report has samples of the last steps, and the first samples of each: a run by rewards writes thousands."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100% } table { border-collapse: collapse; margin: 1rem 0 } summary { cursor: pointer }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd }
td { white-space: pre-wrap; overflow-wrap: anywhere } th { font-weight: 600 }
"""


def write_report(run: str | Path, *, model_step: int | None = None, devices: str | None = None) -> Path:
    """Writes report.html into a run's output folder, complete or absent, and returns its path.

    It has the loss of training and of held-out data, the load of experts or rewards, the throughput,
    samples, settings and versions. Pictures are part of the file.

    Args:
      run: the output folder of `finetune`, `prefer` or `grpo`; the run may still be in progress.
      model_step: the step of the exported weights. Default: no step is named.
      devices: a description of the devices. Default: none is given.

    Raises:
      FileNotFoundError: `run` is not such a folder, or has no step yet.
    """
    run = Path(run).expanduser()
    with tempfile.TemporaryDirectory() as folder:
        pictures = plot_run(run, folder)
        records = read_records(run / "metrics.jsonl")
        pictures.append(_throughput(records, Path(folder) / "throughput.png"))
        images = "\n".join(map(_image, pictures))
    settings = noted_settings(run)
    versions = settings.pop("versions", {}) | ({"started": settings.pop("started", "unknown")} if settings else {})
    versions |= {} if devices is None else {"devices": devices}
    kinds = {"preference": "Preferences of", "grpo": "Reinforcement learning of"}
    kind = next((text for name, text in kinds.items() if name in settings), "Fine-tuning of")
    title = escape(f"{kind} {settings.get('model', 'a model')}")
    parts = [
        f"<h1>{title}</h1>",
        _table(summary(records, model_step)),
        images,
        _samples(run / SAMPLES),
        "<h2>Settings</h2>",
        _table(settings),
        "<h2>Versions</h2>",
        _table(versions),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    write_text(run / REPORT, f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n')
    return run / REPORT


def summary(records: list[dict[str, Any]], model_step: int | None) -> dict[str, Any]:
    """Returns a run's results by their names, for the top of its report.

    Args:
      records: the lines of metrics.jsonl.
      model_step: as in `write_report`.
    """
    last = records[-1]
    found = {"steps": last["step"], "loss of the last step": f"{last['loss']:.4f}"}
    measured = [record for record in records if "eval_loss" in record]
    if measured:
        best = min(measured, key=lambda record: record["eval_loss"])
        found["held-out loss at the end"] = f"{measured[-1]['eval_loss']:.4f}"
        found["smallest held-out loss"] = f"{best['eval_loss']:.4f}, step {best['step']}"
    found |= {
        f"{name.replace('_', ' ')} at the end": f"{last[name]:.4f}"
        for name in ("reward_margin", "reward_accuracy", "reward", "eval_reward", "completions/mean_length")
        if name in last
    }
    if model_step is not None:
        found["exported weights"] = f"step {model_step}"
    # The median, because a process's first step compiles.
    found["tokens a second, median"] = f"{statistics.median(record['tokens_per_second'] for record in records):,.0f}"
    return found


def _throughput(records: list[dict[str, Any]], path: Path) -> Path:
    """Draws the tokens of each second over the steps."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="tokens a second", title="Throughput")
    speeds = [record["tokens_per_second"] for record in records]
    axes.plot([record["step"] for record in records], speeds, color="tab:green")
    axes.set_ylim(0, 1.1 * max(speeds))
    axes.grid(alpha=0.3)
    save_png(figure, path)
    return path


def _image(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="{file.stem.replace("_", " ")}" src="data:image/png;base64,{data}"></p>'


def _samples(file: Path) -> str:
    """Returns the samples: the last step's, and the earlier steps' in a collapsed section; of many, a part."""
    records = read_records(file)[-MOST_STEPS:]
    if not records:
        return ""
    of_steps = [f"<h3>Step {record['step']}</h3>" + _pairs(record["samples"]) for record in reversed(records)]
    earlier = f"<details><summary>Earlier samples</summary>{''.join(of_steps[1:])}</details>" if of_steps[1:] else ""
    return f"<h2>Samples</h2>{of_steps[0]}{earlier}"


def _pairs(samples: list[dict[str, Any]]) -> str:
    rewarded = any("reward" in each for each in samples)
    names = ("prompt", "text", *(["reward"] if rewarded else []))
    rows = (
        "".join(f"<td>{escape(value if isinstance(value := each[name], str) else json.dumps(value))}</td>" for name in names)
        for each in samples[:MOST_SAMPLES]
    )
    heads = f"<th>prompt</th><th>continuation</th>{'<th>reward</th>' if rewarded else ''}"
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _table(values: dict[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in texts.items())
    return f"<table>{''.join(rows)}</table>"
