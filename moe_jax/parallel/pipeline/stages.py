"""Brings layers of `chunks.to_chunks` to the ranks on which a schedule wants their stages, and gradients back.

`to_chunks` puts stage c p + r on rank r of p as chunk c. A schedule may want stages elsewhere, or twice:

| schedule | stages of rank r | where they lie |
|---|---|---|
| 1f1b, interleaved, zb-h1 | r, p + r, ... | as wanted |
| dualpipe | r and p - 1 - r | the second on rank p - 1 - r |
| zb-v, dualpipe-v | r and 2 p - 1 - r | the second on rank p - 1 - r |

So one exchange between ranks r and p - 1 - r at each end of a step is enough. Checkpoints and optimizers know no schedule.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.pipeline.schedules import Schedule


class Source(NamedTuple):
    """The place of a schedule's chunk in the layout of `to_chunks`."""

    chunk: int
    ranks: tuple[int, ...]
    """For each rank, the rank on which its stage lies."""


def sources(schedule: Schedule) -> tuple[Source, ...]:
    """Returns the places of each chunk of the schedule."""
    ranks = len(schedule.stages)
    return tuple(
        Source(stages[0] // ranks, tuple(stage % ranks for stage in stages)) for stages in zip(*schedule.stages, strict=True)
    )


def to_stages(stored: Any, schedule: Schedule) -> Any:
    """Returns a rank's arrays [chunks of `to_chunks`, l, ...] as [chunks of the schedule, l, ...], inside `jax.shard_map`."""

    def of_array(array: Array) -> Array:
        return jnp.stack([_send(array[chunk], ranks, back=False) for chunk, ranks in sources(schedule)])

    return jax.tree.map(of_array, stored)


def from_stages(gradients: Any, schedule: Schedule) -> Any:
    """Transposes `to_stages`: brings gradients home, and sums those of a stage that lies on two ranks."""

    def of_array(array: Array) -> Array:
        places = sources(schedule)
        stored: list[Any] = [None] * (1 + max(chunk for chunk, _ in places))
        for part, (chunk, ranks) in zip(array, places, strict=True):
            home = _send(part, ranks, back=True)
            stored[chunk] = home if stored[chunk] is None else stored[chunk] + home
        return jnp.stack(stored)

    return jax.tree.map(of_array, gradients)


def layers_of_stages(stacked: Any, schedule: Schedule, num_layers: int, rank: Int[Array, ""]) -> Any:
    """Returns the rank's layers of arrays [layers, ...] as [chunks x l, ...], with l = `num_layers` of a stage.

    Layers that fill up the last stages are zeros.
    """
    stages = _stages_of(schedule, rank)

    def own(array: Array) -> Array:
        missing = schedule.num_stages * num_layers - array.shape[0]
        filled = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
        return filled.reshape(-1, num_layers, *array.shape[1:])[stages].reshape(-1, *array.shape[1:])

    return jax.tree.map(own, stacked)


def layers_of_all_stages(own: Any, schedule: Schedule, num_layers: int, rank: Int[Array, ""]) -> Any:
    """Returns arrays [chunks x l, ...] of a rank as [stages x l, ...], zeros for the layers of other ranks."""
    stages = _stages_of(schedule, rank)

    def placed(array: Array) -> Array:
        parts = array.reshape(-1, num_layers, *array.shape[1:])
        whole = vary_as(jnp.zeros((schedule.num_stages, *parts.shape[1:]), parts.dtype), (parts, stages))
        return whole.at[stages].add(parts).reshape(-1, *array.shape[1:])

    return jax.tree.map(placed, own)


def _stages_of(schedule: Schedule, rank: Int[Array, ""]) -> Int[Array, " chunks"]:
    return jnp.asarray(schedule.stages, jnp.int32)[rank]


def _send(array: Array, sources: tuple[int, ...], *, back: bool) -> Array:
    """Returns the array of rank `sources[rank]`; with `back`, of the rank whose source this one is."""
    pairs = [(source, rank) for rank, source in enumerate(sources)]
    if all(source == rank for source, rank in pairs):
        return array
    return lax.ppermute(array, "pipe", [(rank, source) for source, rank in pairs] if back else pairs)
