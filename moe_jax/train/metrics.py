"""The log of a training run, written at every step: JSON Lines that survive a crash, and TensorBoard if asked.

metrics.jsonl has a step's scalars, expert_load.jsonl the load and entropy of each layer's router (`of_layers`).
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.config import ModelConfig
from moe_jax.runtime.files import write_text
from moe_jax.train.objective import TAKEN_NAMES

_logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends scalars to `folder`/metrics.jsonl, and lists over the layers to `folder`/expert_load.jsonl.

    A run that resumes from step n drops the records after n, so that the files have each step once.
    """

    def __init__(self, folder: Path, *, resumed_step: int, tensorboard: bool = False):
        self.metrics_file, self.load_file = folder / "metrics.jsonl", folder / "expert_load.jsonl"
        for file in (self.metrics_file, self.load_file):
            keep_steps(file, resumed_step)
        self.board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, record: dict[str, Any], of_layers: dict[str, list]) -> None:
        """Logs one step: scalars including "step", and per-layer lists of router metrics, if any."""
        append_record(self.metrics_file, record)
        if of_layers:
            append_record(self.load_file, {"step": record["step"], **of_layers})
        if self.board is not None:
            for name, value in record.items():
                if name != "step":
                    self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flushes TensorBoard; the JSON Lines are on disk already."""
        if self.board is not None:
            self.board.close()


def read_records(file: Path) -> list[dict[str, Any]]:
    """Reads the records of a JSON Lines log, one per step, in order of steps; none if there is no file.

    If a step occurs twice, the later record counts. A last line truncated by a crash is skipped silently, any other bad line
    with a warning.
    """
    if not file.exists():
        return []
    records, lines = {}, file.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[record["step"]] = record
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                _logger.warning("%s:%d is no record of a step; left out", file, number)
    return [records[step] for step in sorted(records)]


def record_of_step(
    step: int, metrics: dict[str, np.ndarray], config: ModelConfig, seconds: float, flops_per_token: float
) -> dict[str, Any]:
    """Returns a step's scalars for the log, from the metrics of `make_train_step`'s step and the seconds that it took.

    Scalars under names of the objective's own are kept.
    """
    tokens_per_second = float(metrics["num_tokens"]) / seconds
    losses = "loss", "aux_loss", "sequence_loss", "z_loss", "grad_norm", "learning_rate"
    record = {"step": step} | {name: float(metrics[name]) for name in losses if name in metrics}
    record |= {"tokens_per_second": tokens_per_second, "model_tflops": tokens_per_second * flops_per_token / 1e12}
    record["step_time"] = seconds
    if "expert_load" in metrics:
        record |= mean_loads(metrics["expert_load"])
        record |= {"num_dropped": int(metrics["num_dropped"])} if "num_dropped" in metrics else {}
        if config.routed_layers:
            means = "router_entropy", "num_rounds", "num_shadows"
            record |= {name: float(metrics[name].mean()) for name in means if name in metrics}
        if "expert_bias_range" in metrics:
            smallest, largest = metrics["expert_bias_range"].T
            record["max_expert_bias_range"] = float((largest - smallest).max())
    if config.mtp_stages and "mtp_loss" in metrics:
        record["mtp_loss"] = float(metrics["mtp_loss"])
    # A model without MTP modules has an MTP loss of 0.
    others = metrics.keys() - record.keys() - {*TAKEN_NAMES, "mtp_loss"}
    return record | {name: float(value) for name, value in metrics.items() if name in others and value.ndim == 0}


class Clock:
    """Estimates a run's remaining time, ignoring the first step, which includes compilation."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left(self, step: int, last: int) -> str:
        """Returns the estimated time until step `last` ends, as text; empty if unknown."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
            return ""
        first, began = self._first
        seconds = round((now - began) / (step - first) * (last - step))
        return f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left" if step < last else ""


def one_line(record: dict[str, Any], *, compiled: float | None = None) -> str:
    """Formats a record for the console; a step that compiled shows its seconds (`compiled`) instead of throughput."""
    shadows = f", {record['num_shadows']:.1f} shadows a layer" if record.get("num_shadows") else ""
    measured = {"loss": ".4f", "reward": ".3f", "reward_margin": ".3f", "reward_accuracy": ".2f"}
    held_out = "".join(
        f", eval {name.removeprefix('reward_')} {record[f'eval_{name}']:{digits}}"
        for name, digits in measured.items()
        if f"eval_{name}" in record
    )
    reward = f"reward {record['reward']:.3f}, length {record['completions/mean_length']:.0f}, " if "reward" in record else ""
    aux = f", aux {record['aux_loss']:.3f}" if "aux_loss" in record else ""
    load = f", max/mean load {record['max_mean_expert_load']:.2f}" if "max_mean_expert_load" in record else ""
    margin = f", margin {record['reward_margin']:.3f}" if "reward_margin" in record else ""
    accuracy = f", accuracy {record['reward_accuracy']:.2f}" if "reward_accuracy" in record else ""
    examples = f", {record['num_examples']:g} examples" if "num_examples" in record else ""
    speed = f"{record['tokens_per_second']:.0f} tokens/s, {record['model_tflops']:.3g} TFLOP/s"
    speed = speed if compiled is None else f"compiled in this step, {compiled:.0f} s"
    return (
        f"{reward}loss {record['loss']:.4f}{held_out}{margin}{accuracy}{aux}, grad norm {record['grad_norm']:.3f}, "
        f"lr {record['learning_rate']:.2e}{examples}, {speed}{load}{shadows}"
    )


def of_layers(metrics: dict[str, np.ndarray], layers: tuple[int, ...]) -> dict[str, list]:
    """Returns a step's router metrics per MoE layer, for expert_load.jsonl; {} for a dense model.

    `layers` (their indices in the model), `expert_load` [layers, experts] in tokens, `router_entropy` [layers] in nats.
    `num_rounds` and `num_shadows` [layers] describe the exchange with other devices' experts, as means over the devices.
    `expert_bias_range` [layers, 2] is the smallest and largest bias, for models with biases.
    """
    if not layers or "expert_load" not in metrics:
        return {}
    names = ("expert_load", "router_entropy", "num_rounds", "num_shadows", "expert_bias_range")
    return {"layers": list(layers)} | {name: np.asarray(metrics[name]).tolist() for name in names if name in metrics}


def mean_loads(expert_load: np.ndarray) -> dict[str, float]:
    """Returns the metrics of the worst layer's largest and smallest expert load, relative to the mean: 1 is perfect balance.

    The smallest is 0 if an expert got no token. Both are 1 without experts.
    """
    if not expert_load.size or not expert_load.sum():
        return {"max_mean_expert_load": 1.0, "min_mean_expert_load": 1.0}
    shares = expert_load / np.maximum(expert_load.mean(axis=1, keepdims=True), 1e-9)
    return {"max_mean_expert_load": float(shares.max()), "min_mean_expert_load": float(shares.min())}


def keep_steps(file: Path, last_step: int) -> None:
    """Truncates a JSON Lines log after `last_step`; creates it if missing."""
    records = [record for record in read_records(file) if record["step"] <= last_step]
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def append_record(file: Path, record: dict[str, Any]) -> None:
    """Appends a record to a JSON Lines file."""
    with file.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
