"""`moe-jax plan`: lists the meshes on which a model's training step is predicted to fit, the fastest first."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from moe_jax.config import ModelConfig
from moe_jax.cost import PlannedStep, Prediction, predict
from moe_jax.cost.flops import num_parameters
from moe_jax.cost.machine import H200, Machine
from moe_jax.cost.planned_step import BYTES
from moe_jax.layers.passes import Remat
from moe_jax.parallel.choices import MESH_AXES, MeshShape

KINDS = {
    "computing": ("experts", "projections", "attention", "loss", "overhead"),
    "HBM": ("elementwise", "kept", "optimizer"),
    "links": ("exchange", "context", "gathers", "once a step"),
}
"""The parts of a prediction by their bound: arithmetic, the GPU's own memory, links between GPUs."""

REMAT: dict[str, Remat] = {"no": False, "yes": True, "offload": "offload"}
"""Values of `remat` by their names on the command line: keep all residuals, a layer's input, or that input in host memory."""


def plan(
    config: ModelConfig,
    devices: int,
    *,
    rows: int,
    sequence_length: int,
    remat: Remat | None = None,
    machine: Machine = H200,
    **options,
) -> list[Prediction]:
    """Returns predictions for every mesh that can run the batch, the fastest first, including meshes that do not fit.

    Args:
      config: the model.
      devices: GPUs of each mesh.
      rows: sequences of the whole batch, so that all meshes do the same work.
      sequence_length: tokens of each sequence.
      remat: None tries False and True, and "offload" where True does not fit.
      machine: the GPUs and their links.
      options: further fields of `cost.PlannedStep`.

    Raises:
      ValueError: the devices do not fill whole hosts, no mesh can run the batch (with reasons), or `cost.predict` refuses it.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    if machine.gpus_of_host < 1 or (devices > machine.gpus_of_host and devices % machine.gpus_of_host):
        raise ValueError(
            f"devices={devices} must be a multiple of {machine.gpus_of_host}, the GPUs of a host, or less than that"
        )
    predictions, refusals = [], []
    for mesh in meshes(devices):
        for kept in REMAT.values() if remat is None else (remat,):
            try:
                step = PlannedStep(config, mesh, rows, sequence_length, remat=kept, **options)
            except ValueError as error:
                refusals.append(str(error))
                continue
            predictions.append(predict(step, machine))
            if kept is True and predictions[-1].fits:
                break
    if not predictions:
        # The reasons of the first mesh (all `context`) and of the last (all `data`).
        reasons = "; ".join(dict.fromkeys((refusals[0], refusals[-1])))
        raise ValueError(f"no mesh of {devices} devices can run this: {reasons}")
    return sorted(predictions, key=lambda prediction: prediction.step_seconds)


def meshes(devices: int) -> Iterator[MeshShape]:
    """Yields every mesh shape with `devices` devices."""

    def shapes(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (devices,)
            return
        for size in range(1, devices + 1):
            if devices % size == 0:
                yield from ((size, *rest) for rest in shapes(devices // size, axes - 1))

    yield from (MeshShape(*sizes) for sizes in shapes(devices, len(MESH_AXES)))


HEADER = "".join(f"{name:>8}" for name in MESH_AXES) + (
    f"{'remat':>9}{'step':>11}{'tokens/s/GPU':>14}{'TFLOP/s/GPU':>13}{'GiB':>7}" + "".join(f"{kind:>11}" for kind in KINDS)
)


def row(prediction: Prediction) -> str:
    """Returns one line in the columns of HEADER. The last columns are shares of the step."""
    step, seconds = prediction.step, prediction.step_seconds
    remat = next(name for name, value in REMAT.items() if value == step.remat)
    mesh = "".join(f"{size:>8}" for size in asdict(step.mesh).values()) + f"{remat:>9}"
    speed = f"{seconds:>9.3f} s{prediction.tokens_per_second:>14.0f}{prediction.flops_per_second / 1e12:>13.0f}"
    memory = f"{prediction.memory_bytes / 2**30:>7.0f}"
    shares = (sum(prediction.seconds.get(part, 0.0) for part in parts) / seconds for parts in KINDS.values())
    return mesh + speed + memory + "".join(f"{share:>11.0%}" for share in shares)


def format_plan(predictions: list[Prediction], limit: int) -> str:
    """Returns the table of the first `limit` meshes that fit and the command for the first.

    If none fits, returns the needs of the mesh that uses the least memory.
    """
    fitting = [prediction for prediction in predictions if prediction.fits]
    machine = predictions[0].machine
    if not fitting:
        smallest = min(predictions, key=lambda prediction: prediction.memory_bytes)
        room = f"the {machine.memory / 2**30:.0f} of an {machine.name}"
        need = f"{smallest.memory_bytes / 2**30:.0f} GiB"
        reason = f"Nothing fits: the smallest needs {need}, more than {room}. {_remedy(smallest)}"
        return f"{reason}\n{HEADER}\n{row(smallest)}\n{_memory(smallest)}"
    best = fitting[0]
    lines = [HEADER, *(row(prediction) for prediction in fitting[:limit])]
    if len(fitting) > limit:
        lines.append(f"and {len(fitting) - limit} more that fit")
    return "\n".join([*lines, _memory(best), f"train so: {how_to_train(best.step)}"])


def _remedy(prediction: Prediction) -> str:
    """Returns advice for a step that does not fit. State depends on the model, all other memory on tokens per device."""
    state = sum(prediction.bytes[part] for part in ("parameters", "moments", "gradients"))
    if state < prediction.machine.memory:
        return f"{prediction.step.tokens} tokens a GPU are too many: take fewer rows, or more devices."
    step, alone = prediction.step, f"Parameters, moments and gradients alone are {state / 2**30:.0f}"
    whole = (4 + 2 * BYTES[step.moment_dtype] + BYTES[step.param_dtype]) * num_parameters(step.config)
    devices = math.ceil(whole / prediction.machine.memory)
    if step.mesh.size >= devices:
        uneven = f"for {step.mesh.size} devices do not divide the model's matrices"
        return f"{alone}, {uneven}: take a power of two, of at least {devices}."
    smaller = "" if (step.param_dtype, step.moment_dtype) == ("bfloat16", "bfloat16") else ", or bf16 parameters and moments"
    return f"{alone}: take more than {devices} devices{smaller}."


def _memory(prediction: Prediction) -> str:
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in prediction.bytes.items())
    host = f"; and {prediction.host_bytes / 2**30:.0f} of the host's memory for each GPU" if prediction.host_bytes else ""
    return f"GiB of the first: {parts}{host}"


def how_to_train(step: PlannedStep) -> str:
    """Returns the command that trains this step, or `make_train_step`'s arguments if `finetune` lacks its attention method."""
    if step.mesh.context > 1 and step.context_method != "ring":
        method = f"context=ContextParallel(method={step.context_method!r})"
        return f"by moe_jax.train.make_train_step with Parallelism(mesh, {method}); moe-jax finetune takes the ring"
    return f"moe-jax finetune {flags(step)} ..."


def flags(step: PlannedStep) -> str:
    """Returns the options of `moe-jax finetune` for the same step."""
    axes = " ".join(f"--mesh.{name} {size}" for name, size in asdict(step.mesh).items() if size > 1)
    batch = f"--batch-size {step.rows} --seq-len {step.sequence_length}"
    dtypes = f"--param-dtype {step.param_dtype} --moment-dtype {step.moment_dtype}"
    capacity = "" if step.capacity_factor == PlannedStep.capacity_factor else f"--capacity-factor {step.capacity_factor:g}"
    hops = f"--hops {step.hops}" if step.mesh.size > 1 else ""
    remat = {False: "--no-remat", True: "", "offload": "--offload"}[step.remat]
    optimizer = "--shard-optimizer" if step.shard_optimizer and step.mesh.data > 1 else ""
    return " ".join(part for part in (axes, batch, dtypes, capacity, hops, remat, optimizer) if part)
