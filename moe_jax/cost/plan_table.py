"""Table of predictions that `moe-jax plan` prints, with the command or the Slurm script that trains the first of them."""

import math
import shlex
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from moe_jax.cost import PlannedStep, Prediction
from moe_jax.cost.flops import num_parameters
from moe_jax.cost.memory import num_moments
from moe_jax.cost.parameters import BYTES
from moe_jax.cost.rollout import RolloutPrediction
from moe_jax.models.remat import remat_option
from moe_jax.runtime.files import write_text

KINDS = {
    "compute": ("experts", "projections", "attention", "loss", "overhead"),
    "HBM": ("elementwise", "kept", "sums", "copies", "optimizer"),
    "links": ("exchange", "context", "gathers", "hops", "once a step"),
    "bubble": ("bubble",),
}
"""The parts of a prediction by what limits them: arithmetic, the GPU's own memory, links between GPUs, the ends of a pipe."""


NEVER_RUN = {"hosts": "a run over several hosts", "pipe": "a pipeline on more than four GPUs", "FP8": "training in FP8"}
"""Features of a layout that were never run on GPUs (docs/scaling.md), by their word in the table."""

COLUMNS = (
    *("pipe", "chunks", "data", "fsdp", "expert", "context", "micro", "kept"),
    *("step", "tokens/s", "TFLOP/s", "GiB", *KINDS, "never run"),
)
"""The titles of the columns: the mesh, its micro-batches, figures of one GPU, shares of the step, and keys of `NEVER_RUN`."""


def table(predictions: list[Prediction]) -> list[str]:
    """Returns the lines of the table: a legend, a header, and one line per prediction."""
    rows = [COLUMNS, *(_cells(prediction) for prediction in predictions)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = (" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in rows)
    legend = "tokens/s, TFLOP/s and GiB are per GPU; micro is the number of micro-batches"
    return [f"{legend}; kept layers are not recomputed", *lines]


ROLLOUT_COLUMNS = (
    *("data", "fsdp", "batch-size", "pages", "rollout", "gather", "update", "step", "tokens/s"),
    *("GiB, rollout", "GiB, update", "fits"),
)
"""The titles of the columns of `rollout_table`: options of `moe-jax grpo`, seconds, and figures of one GPU."""


def rollout_table(predictions: Iterable[RolloutPrediction]) -> list[str]:
    """Returns a header, a line for each step of reinforcement learning, and the parts of the first one's rollout."""
    predictions = list(predictions)
    rows: list[tuple[str, ...]] = [ROLLOUT_COLUMNS]
    for each in predictions:
        step = each.update.step
        batch_size = step.rows // (step.mesh.size * step.gradient_accumulation)
        seconds = (*each.seconds.values(), sum(each.seconds.values()))
        peaks = sum(each.rollout_bytes.values()), each.update.memory_bytes
        cells = step.mesh.data, step.mesh.fsdp, batch_size, each.rollout.num_pages
        figures = *(f"{value:.1f} s" for value in seconds), f"{each.tokens_per_second:.0f}", *map(_gib, peaks)
        rows.append((*map(str, cells), *figures, "yes" if each.fits else "no"))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in predictions[0].rollout_bytes.items())
    return [*lines, f"GiB of the first rollout: {parts}"]


def never_run(prediction: Prediction) -> list[str]:
    """Returns the keys of `NEVER_RUN`, features that were never run on GPUs, that apply to a prediction."""
    step = prediction.step
    holds = (
        step.mesh.size > prediction.machine.gpus_of_host,
        step.mesh.pipe > 1 and step.mesh.size > 4,
        step.precision != "bf16",
    )
    return [key for key, is_so in zip(NEVER_RUN, holds, strict=True) if is_so]


def _cells(prediction: Prediction) -> list[str]:
    """Returns the cells of a prediction's line."""
    step, seconds = prediction.step, prediction.step_seconds
    sizes = asdict(step.mesh)
    layout = sizes.pop("pipe"), step.pipe_chunks, *sizes.values(), step.gradient_accumulation
    kept = "all" if not step.remat else "offload" if step.remat == "offload" else str(min(step.num_kept, step.num_layers))
    kept = ",".join((kept, *step.keep))
    speed = f"{seconds:.3f} s", f"{prediction.tokens_per_second:.0f}", f"{prediction.flops_per_second / 1e12:.0f}"
    shares = (sum(prediction.seconds.get(part, 0.0) for part in parts) / seconds for parts in KINDS.values())
    gib, marks = _gib(prediction.memory_bytes), "+".join(never_run(prediction)) or "-"
    return [*map(str, layout), kept, *speed, gib, *(f"{share:.0%}" for share in shares), marks]


def _gib(size: float) -> str:
    """Formats bytes in GiB, below 100 with one decimal: rounding to 0 or to the whole memory would mislead."""
    gib = size / 2**30
    return f"{gib:.1f}" if gib < 99.95 else f"{gib:.0f}"


def format_plan(predictions: list[Prediction], limit: int) -> str:
    """Returns the table of the first `limit` meshes that fit and the command for the first.

    If none fits, returns the needs of the mesh that uses the least memory.
    """
    fitting = [prediction for prediction in predictions if prediction.fits]
    machine = predictions[0].machine
    if not fitting:
        smallest = min(predictions, key=lambda prediction: prediction.memory_bytes)
        need, room = _gib(smallest.memory_bytes), _gib(machine.memory)
        reason = f"Nothing fits: the smallest needs {need} GiB, more than the {room} of an {machine.name}. {_remedy(smallest)}"
        return "\n".join([reason, *table([smallest]), _memory(smallest)])
    best = fitting[0]
    lines = table(fitting[:limit])
    if len(fitting) > limit:
        lines.append(f"and {len(fitting) - limit} more that fit")
    lines.append(_memory(best))
    if keys := never_run(best):
        lines.append(f"The first needs what was never run on GPUs: {', '.join(NEVER_RUN[key] for key in keys)}.")
    lines.append(f"Train it with: {how_to_train(best.step)}")
    return "\n".join(lines)


def _remedy(prediction: Prediction) -> str:
    """Returns advice for a step that does not fit. State depends on the model, all other memory on tokens per device."""
    state = sum(prediction.bytes[part] for part in ("parameters", "moments", "gradients"))
    if state < prediction.machine.memory:
        return f"{prediction.step.tokens} tokens a GPU are too many: use fewer or shorter rows, or more devices."
    step, alone = prediction.step, f"Parameters, moments and gradients alone are {state / 2**30:.0f}"
    of_moments = BYTES[step.moment_dtype] * num_moments(step) / sum(elements for *_, elements in step.updated)
    needed: float = (4 + of_moments + BYTES[step.param_dtype]) * num_parameters(step.config)
    if step.adapters is not None:
        needed = sum((p.quantised or BYTES[step.param_dtype]) * p.whole_size(step.mesh) for p in step.parameters)
        needed += (8 + of_moments) * step.adapters.parameters
    devices = math.ceil(needed / prediction.machine.memory)
    if step.mesh.size >= devices:
        uneven = f"for {step.mesh.size} devices do not divide the model's matrices"
        return f"{alone}, {uneven}: use a power of two, of at least {devices}."
    smaller = "" if (step.param_dtype, step.moment_dtype) == ("bfloat16", "bfloat16") else ", or bf16 parameters and moments"
    if step.adapters is not None:
        smaller = ", or --weights nf4" if step.adapters.weights == "whole" else ""
    return f"{alone}: use more than {devices} devices{smaller}."


def _memory(prediction: Prediction) -> str:
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in prediction.bytes.items())
    host = f"; and {prediction.host_bytes / 2**30:.0f} of the host's memory for each GPU" if prediction.host_bytes else ""
    return f"GiB of the first: {parts}{host}"


def how_to_train(step: PlannedStep) -> str:
    """Returns the command that trains this step, or `make_train_step` arguments if `finetune` cannot run it."""
    if step.mesh.context > 1 and step.context_method != "ring":
        method = f"context=ContextParallel(method={step.context_method!r})"
        return f"by moe_jax.train.make_train_step with Parallelism(mesh, {method}); moe-jax finetune supports only the ring"
    return f"moe-jax finetune {flags(step)} ..."


def flags(step: PlannedStep) -> str:
    """Returns the `moe-jax finetune` options that configure the same step."""
    axes = " ".join(f"--mesh.{name} {size}" for name, size in asdict(step.mesh).items() if size > 1)
    chunks = f"--pipe-chunks {step.pipe_chunks}" if step.mesh.pipe > 1 else ""
    chunks += "" if step.pipe_schedule == "uniform" else f" --pipe-schedule {step.pipe_schedule}"
    micro_batches = f"--gradient-accumulation {step.gradient_accumulation}" if step.gradient_accumulation > 1 else ""
    overlap = "" if step.overlap_micro_batches is None else f"--overlap-micro-batches {step.overlap_micro_batches}"
    batch = f"--batch-size {step.rows} --seq-len {step.sequence_length}"
    dtypes = f"--param-dtype {step.param_dtype} --moment-dtype {step.moment_dtype}"
    dtypes += "" if step.optimizer == "adamw" else f" --optimizer {step.optimizer}"
    capacity = "" if step.capacity_factor == PlannedStep.capacity_factor else f"--capacity-factor {step.capacity_factor:g}"
    hops = f"--hops {step.hops}" if step.mesh.size > 1 else ""
    remat = {False: "--no-remat", True: "--remat", "offload": "--offload"}[step.remat]
    remat += f" {kept}" if (kept := remat_option(step.num_kept, step.keep)) else ""
    optimizer = "--shard-optimizer" if step.shard_optimizer and step.mesh.data > 1 else ""
    lora = "" if step.adapters is None else step.adapters.options
    precision = "" if step.precision == "bf16" else f"--precision {step.precision}"
    tokens = "--tokens-in-fp8" if step.tokens_in_fp8 and step.exchange else ""
    parts = (lora, precision, axes, chunks, batch, micro_batches, dtypes, capacity, tokens, hops, overlap, remat, optimizer)
    return " ".join(part for part in parts if part)


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=finetune
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gres=gpu:{gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# sbatch FILE --model FOLDER --data FILE --output FOLDER, with more options of `moe-jax finetune` if needed.
# All nodes must see these paths, and the environment that wrote this script:
set -euo pipefail
export PATH={programs}:$PATH
# Every process would ask the hub otherwise; download once beforehand: hf download NAME --local-dir FOLDER
export HF_HUB_OFFLINE=1

status=0
srun --kill-on-bad-exit=1 moe-jax finetune \\
  {flags} "$@" || status=$?
# 143: Slurm has sent SIGTERM before the end of the time, and the run has saved. The next job continues from there.
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def write_batch_script(path: Path, step: PlannedStep, gpus_of_host: int) -> None:
    """Writes the script that trains on the mesh of `step`; the file is complete or absent.

    Raises:
      ValueError: `path` is a folder, or its folder does not exist, or the step needs an attention method other than the ring.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--sbatch {path}: give a file in a folder that exists")
    if step.mesh.context > 1 and step.context_method != "ring":
        raise ValueError(f"--sbatch: moe-jax finetune splits sequences by the ring alone; this run takes {step.context_method}")
    gpus = min(gpus_of_host, step.mesh.size)
    nodes, programs = math.ceil(step.mesh.size / gpus), shlex.quote(sysconfig.get_path("scripts"))
    # GPU to GPU copies need one process for all GPUs.
    tasks = 1 if step.hops == "copies" else gpus
    numbers = dict(nodes=nodes, tasks=tasks, gpus=gpus, cpus=8 * gpus // tasks)
    write_text(path, SCRIPT.format(**numbers, programs=programs, flags=flags(step)))
