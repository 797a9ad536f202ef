"""`moe-jax plan`: tries every mesh for a model's training step, and orders the predictions, the fastest first."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from moe_jax.config import ModelConfig
from moe_jax.cost import PlannedStep, Prediction, predict
from moe_jax.cost.machine import H200, Machine
from moe_jax.cost.parameters import dealt_out
from moe_jax.cost.step import with_fastest_kept
from moe_jax.layers.passes import Remat
from moe_jax.models.execution import Execution
from moe_jax.parallel.choices import MESH_AXES, MeshShape, PipeSchedule
from moe_jax.parallel.pipeline.chunks import fills_chunks, layers_of_chunk

REMAT: dict[str, Remat] = {"no": False, "yes": True, "offload": "offload"}
"""Values of `remat` by their names on the command line: keep all residuals, a layer's input, or that input in host memory."""


MODEL_ERROR: dict[Remat, float] = {True: 0.05, "offload": 0.05, False: 0.09}
"""Share by which a pipe must be predicted faster to rank before a mesh without one: the model's error so far, by remat
(docs/log/parallel.md, "A pipeline on four GPUs")."""

MAX_PADDING = 0.07
"""Largest share by which a pipe's layer slots may exceed its layers."""

MAX_CHUNKS = 8
"""Largest number of chunks per rank to try: more chunks add hops, and the bubble hardly shrinks."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of micro-batches that are tried, for each rank of a pipe."""


def plan(
    config: ModelConfig,
    devices: int,
    *,
    rows: int,
    sequence_length: int,
    remat: Remat | int | str | None = None,
    machine: Machine = H200,
    pipe_schedule: PipeSchedule = "uniform",
    **options,
) -> list[Prediction]:
    """Returns predictions for every mesh that can run the batch, in the order of `rank`, including meshes that do not fit.

    Each mesh uses the number of micro-batches (and of chunks in a pipe) that is fastest among those that fit. If none fits, it
    uses the numbers with the least memory. Left out are pipes with quantised frozen weights, and pipes with experts or
    sequences split over hosts.

    Args:
      config: the model.
      devices: GPUs of each mesh.
      rows: sequences of the whole batch, so that all meshes do the same work.
      sequence_length: tokens of each sequence.
      remat: a number of last layers keep their residuals. None: as many as fit, and "offload" where recomputing all layers
        does not fit. In a pipe all or none of the layers keep them.
      machine: the GPUs and their links.
      pipe_schedule: for meshes with a pipe; meshes that the schedule refuses are left out.
      options: further fields of `cost.PlannedStep`.

    Raises:
      ValueError: the devices do not fill whole hosts, no mesh can run the batch (with reasons), or `cost.predict` refuses it.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    if machine.gpus_of_host < 1:
        raise ValueError(f"hosts_of={machine.gpus_of_host} must be at least 1")
    if devices > machine.gpus_of_host and devices % machine.gpus_of_host:
        raise ValueError(
            f"devices={devices} must be a multiple of {machine.gpus_of_host}, the GPUs of a host, or less than that"
        )
    predictions, refusals = [], []
    adapters = options.get("adapters")
    is_quantised = adapters is not None and adapters.weights != "whole"
    for mesh in meshes(devices):
        if mesh.pipe > 1 and (is_quantised or mesh.expert * mesh.context > machine.gpus_of_host):
            continue
        tried: list[Remat | int | str | None] = [remat]
        if remat is None:
            tried = list(REMAT.values()) if mesh.pipe > 1 else [None, "offload"]
        for kept in tried:
            of_mesh: PipeSchedule = pipe_schedule if mesh.pipe > 1 else "uniform"
            planned = partial(PlannedStep, config, mesh, rows, sequence_length, pipe_schedule=of_mesh, **options)
            found = _fastest(planned, kept, config, mesh, machine)
            if isinstance(found, str):
                refusals += [found] if mesh.pipe == 1 else []
                continue
            predictions.append(found)
            if kept in (True, None) and predictions[-1].fits:
                break
    if not predictions:
        # The reasons of the first mesh (all `context`) and of the last without a pipe (all `data`).
        reasons = "; ".join(dict.fromkeys((refusals[0], refusals[-1])))
        raise ValueError(f"no mesh of {devices} devices can run this: {reasons}")
    return sorted(predictions, key=rank)


def rank(prediction: Prediction) -> float:
    """Returns the sort key of `plan`: the step's seconds, increased by `MODEL_ERROR` for pipelines."""
    step = prediction.step
    return prediction.step_seconds * (1 + MODEL_ERROR[step.remat] if step.mesh.pipe > 1 else 1)


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


def _fastest(
    planned: Callable[..., PlannedStep], remat: Remat | int | str | None, config: ModelConfig, mesh: MeshShape, machine: Machine
) -> Prediction | str:
    """Returns the fastest step that fits, over numbers of micro-batches, chunks and kept layers, or else the smallest.

    Numbers of micro-batches grow until steps that fit become slower. If no step can run on the mesh, returns the reason against
    the smallest numbers.
    """
    best: Prediction | None = None
    refusals = []
    for number in MICRO_BATCHES:
        found = []
        for chunks in chunk_counts(config, mesh.pipe):
            try:
                step = partial(planned, gradient_accumulation=number * mesh.pipe, pipe_chunks=chunks)
                steps = _steps(step, remat, machine)
            except ValueError as error:
                refusals.append(str(error))
            else:
                found += [predict(step, machine) for step in steps]
        if not found:
            continue
        fastest = min(found, key=_order)
        if best is not None and best.fits and _order(best) <= _order(fastest):
            break
        best = fastest if best is None else min(best, fastest, key=_order)
        if sum(best.bytes[part] for part in ("parameters", "moments")) > machine.memory:
            break
    return best or (refusals[0] if refusals else "no number of chunks divides the layers well")


def _steps(planned: Callable[..., PlannedStep], remat: Remat | int | str | None, machine: Machine) -> list[PlannedStep]:
    """Returns the step with this remat; for None, the steps in which no layer, all, and as many as fit keep their residuals."""
    if remat is None:
        step = planned(remat=True)
        return [replace(step, remat=False), with_fastest_kept(step, machine.memory, machine), step]
    kept = Execution().with_remat(remat)
    return [planned(remat=kept.remat, num_kept=kept.num_kept, keep=kept.keep)]


def _order(prediction: Prediction) -> tuple[bool, float]:
    return not prediction.fits, prediction.step_seconds if prediction.fits else prediction.memory_bytes


def chunk_counts(config: ModelConfig, ranks: int) -> list[int]:
    """Returns the numbers of chunks per rank worth trying: those that waste few padding layers (`MAX_PADDING`)."""
    if ranks == 1:
        return [1]
    layers = dealt_out(config).num_layers
    return [
        chunks
        for chunks in range(1, MAX_CHUNKS + 1)
        if fills_chunks(layers, ranks, chunks)
        and ranks * chunks * layers_of_chunk(layers, ranks, chunks) <= (1 + MAX_PADDING) * layers
    ]
