"""The settings of a run on preferences, checked as a whole before anything happens."""

import math
from dataclasses import dataclass
from pathlib import Path

from moe_jax.adapters.settings import LoraSettings
from moe_jax.models.precision import DenseGroup, PrecisionName
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.finetuning.best import best_problems
from moe_jax.recipes.finetuning.lora_settings import Weights, default_param_dtype, weights_problems
from moe_jax.recipes.finetuning.precision import dense_problems, precision_problems
from moe_jax.recipes.finetuning.trackers import Tracker, log_problems

LEARNING_RATE, LORA_LEARNING_RATE = 1e-6, 1e-5
"""Peaks of the learning rate: preferences need less than fine-tuning, and adapters about ten times as much as all weights."""


@dataclass(frozen=True)
class PreferSettings:
    """Train a model on preferences (DPO and others). The same command continues an interrupted run.

    moe-jax prefer --model Qwen/Qwen3-30B-A3B --data pairs.jsonl --output runs/mine --lora.rank 32 --preference.beta 0.1

    The settings of `recipes.prefer`; wrong values raise a ValueError that lists them. A run uses one device.

    Attributes:
      model: a checkpoint folder or hub id.
      data: a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a folder of some, in a layout of docs/preferences.md.
      output: the folder for metrics and checkpoints. A run that finds checkpoints there continues from the last one.
      eval_data: held-out preferences to measure loss, margins and accuracy on; None: no measurement.
      eval_every: steps between two measurements; the last step is always measured.
      eval_batches: batches in a measurement, each with a micro-batch's rows; the same each time.
      keep_best: keep the checkpoint with the smallest held-out loss beside the newest ones, and end with its weights. Each
        improvement writes a checkpoint. May be changed when a run continues, as `early_stop`.
      early_stop: end the run after this number of measurements of the held-out loss without an improvement; 0: never.
      plain_text: prompts and answers that are strings are texts to be continued, not messages of a chat.
      tokenizer: a folder or hub id; None: the model's.
      preference: the loss and its numbers.
      lora: train adapters beside the model's weights, and compare with the model without them. None: train all parameters.
        The model's own log-probabilities of all answers are then computed once, before the first step.
      seq_len: tokens in a row. Pairs are packed into rows.
      max_length: tokens of a prompt and its answer; longer texts are cut at their end. None: half of seq_len, because a row
        holds both texts of a pair; for kto seq_len.
      batch_size: packed rows, not pairs, in an optimizer step, over all micro-batches. A row holds the pairs that fit; the log
        counts the pairs of each step.
      gradient_accumulation: micro-batches in an optimizer step.
      steps: total number of optimizer steps. Run the command again with a larger value to continue a run that has ended.
      epochs: passes through the data, in place of `steps`; all examples are tokenized once to count the steps.
      learning_rate: the peak, reached after `warmup_steps`; afterwards the rate falls along a cosine. None: 1e-6, and 1e-5
        with lora.
      min_learning_rate_ratio: the learning rate at the end, as a part of the peak.
      warmup_steps: steps in which the learning rate rises to its peak; None: a tenth of `steps`, at most 100.
      weight_decay: AdamW's weight decay; norms and biases do not decay.
      max_grad_norm: gradients with a larger norm are scaled down to it.
      seed: decides the order of examples, and the beginning of adapters.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep_checkpoints: the number of newest checkpoints to keep.
      dtype: the dtype that the model computes in, "bfloat16" or "float32".
      param_dtype: the dtype of parameters, "float32" or "bfloat16". None: float32, and `dtype` for the frozen weights beside
        adapters.
      weights: the form of the weights beside adapters: "whole", "as stored" for a checkpoint in FP8, or experts in "nf4" or
        "fp8" (docs/adapters.md).
      precision: "fp8" multiplies the experts in 8 bits, forward and for the gradients of their inputs; "fp8_kept" also keeps
        their activations so (docs/fp8.md). "bf16": in `dtype`.
      fp8_dense: with precision "fp8", dense matrices that multiply in 8 bits too: attention (its projections), shared_experts,
        mlp (dense layers). See docs/fp8.md.
      remat: recompute each layer in the backward pass: less memory, about a third more time.
      log_every: steps between two lines on the console, as in `FinetuneSettings`. May be changed when a run continues.
      tensorboard: write output/tensorboard too.
      log_to: further places for the log, any of tensorboard (output/tensorboard), wandb and trackio. The two send scalars and
        settings to their servers; each is a package to install. May be changed when a run continues.
      dry_run: check everything, and print the data and its first example. Train nothing, read no weights, write no file.
    """

    model: str
    data: str
    output: str
    eval_data: str | None = None
    eval_every: int = 50
    eval_batches: int = 8
    keep_best: bool = False
    early_stop: int = 0
    plain_text: bool = False
    tokenizer: str | None = None
    preference: PreferenceSettings = PreferenceSettings()
    lora: LoraSettings | None = None
    seq_len: int = 4096
    max_length: int | None = None
    batch_size: int = 8
    gradient_accumulation: int = 1
    steps: int = 500
    epochs: float | None = None
    learning_rate: float | None = None
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    dtype: str = "bfloat16"
    param_dtype: str | None = None
    weights: Weights = "whole"
    precision: PrecisionName = "bf16"
    fp8_dense: tuple[DenseGroup, ...] = ()
    remat: bool = True
    log_every: int | None = None
    tensorboard: bool = False
    log_to: tuple[Tracker, ...] = ()
    dry_run: bool = False

    def __post_init__(self):
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", LEARNING_RATE if self.lora is None else LORA_LEARNING_RATE)
        if self.param_dtype is None:
            object.__setattr__(self, "param_dtype", default_param_dtype(self.lora, self.dtype))
        if problems := _problems(self):
            raise ValueError("PreferSettings: " + "; ".join(problems))


def _problems(settings: PreferSettings) -> list[str]:
    """Returns the problems of the settings, one clause each."""
    problems = []
    names = "eval_every eval_batches seq_len batch_size gradient_accumulation steps checkpoint_every keep_checkpoints"
    for name in [*names.split(), *(["log_every"] if settings.log_every is not None else [])]:
        value, least = getattr(settings, name), 4 if name == "seq_len" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(f"{name}={value!r} must be an integer of at least {least}")
    if isinstance(settings.early_stop, bool) or not isinstance(settings.early_stop, int) or settings.early_stop < 0:
        problems.append(f"early_stop={settings.early_stop!r} must be an integer of at least 0")
    for name in ("learning_rate", "max_grad_norm", *(["epochs"] if settings.epochs is not None else [])):
        if not 0 < getattr(settings, name) < float("inf"):
            problems.append(f"{name}={getattr(settings, name)!r} must be a number greater than 0")
    if not 0 <= settings.weight_decay < float("inf"):
        problems.append(f"weight_decay={settings.weight_decay!r} must be a number of at least 0")
    if not 0 <= settings.min_learning_rate_ratio <= 1:
        problems.append(f"min_learning_rate_ratio={settings.min_learning_rate_ratio!r} must be a number from 0 to 1")
    for name in ("dtype", "param_dtype"):
        if getattr(settings, name) not in ("bfloat16", "float32"):
            problems.append(f"{name}={getattr(settings, name)!r} must be bfloat16 or float32")
    if problems:
        return problems
    problems += weights_problems(settings.weights, settings.lora, devices=1)
    problems += precision_problems(settings.precision, settings.dtype, "uniform", settings.lora, settings.weights)
    problems += dense_problems(settings.fp8_dense, settings.precision)
    problems += best_problems(settings)
    problems += log_problems(settings.tensorboard, settings.log_to)
    if settings.batch_size % settings.gradient_accumulation:
        problems.append(
            f"batch_size={settings.batch_size} must be a multiple of gradient_accumulation={settings.gradient_accumulation}"
        )
    if settings.epochs is not None and settings.steps != PreferSettings.steps:
        problems.append(f"epochs={settings.epochs} and steps={settings.steps} exclude each other: give one of them")
    most = math.inf if settings.epochs is not None else settings.steps
    if settings.warmup_steps is not None and not 0 <= settings.warmup_steps <= most:
        problems.append(f"warmup_steps={settings.warmup_steps} must be from 0 to steps={settings.steps}")
    for name in ("model", "data", "output"):
        if not getattr(settings, name):
            problems.append(f"{name} must not be empty")
    output = Path(settings.output).expanduser()
    for name, path in (("data", settings.data), ("eval_data", settings.eval_data)):
        if path is not None and not Path(path).expanduser().exists():
            problems.append(f"{name}={path!r} does not exist")
    for name, path in (("model", settings.model), ("data", settings.data)):
        if output.resolve() == Path(path).expanduser().resolve():
            problems.append(f"output={settings.output!r} must be another folder than {name}")
    if output.is_file():
        problems.append(f"output={settings.output!r} is a file; it must be a folder")
    return problems
