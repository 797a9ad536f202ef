"""The layers of a pipeline: [layers, ...] becomes [chunks, ranks, layers of a chunk, ...]; `pipe` splits the second axis.

Rank r of p holds chunk c, the layers (c p + r) l to (c p + r) l + l - 1. The order of the layers stays, so the change is a
reshape. If v p l layers are more than the model has, the last are zeros. A layer of zeros adds nothing to the residual stream
and gets no gradients.

A schedule may want stages elsewhere than on rank r as chunk c, or twice:

| schedule | stages of rank r | where they lie |
|---|---|---|
| 1f1b, interleaved, zb-h1 | r, p + r, ... | as wanted |
| dualpipe | r and p - 1 - r | the second on rank p - 1 - r |
| zb-v, dualpipe-v | r and 2 p - 1 - r | the second on rank p - 1 - r |

So one exchange between ranks r and p - 1 - r at each end of a step (`to_stages`, `from_stages`) is enough. Checkpoints and
optimizers know no schedule.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.layout import lies_in_chunks, parameter_path, parameter_sharding
from moe_jax.parallel.pipeline.schedules import Schedule


class PipeShape(NamedTuple):
    """The ranks of a pipeline, and the chunks of each. One rank is no pipeline: the layers lie along one axis."""

    ranks: int = 1
    chunks: int = 1


class LayersInPipe(NamedTuple):
    """The layers of a model that a pipeline deals out: those of one stage. The others lie as on any mesh."""

    stage: int
    num_layers: int


def to_chunks(params: nnx.State, mesh: Mesh, chunks: int = 1) -> nnx.State:
    """Lays a model's parameters out for a pipeline over the mesh axis `pipe`, one array after the other.

        nnx.update(model, to_chunks(nnx.state(model), mesh, chunks=2))
        state = train.init_state(model, optimizer)

    Biases of experts stay whole on every device, in the order of the layers. The model can be trained and saved now, and
    nothing else. `from_pretrained(mesh=, pipe_chunks=)` loads a model so, and no device holds all layers on the way.

    Args:
      params: `nnx.state(model)`. Of DeepSeek-V3 the layers with experts lie in chunks, and the rest as on any mesh.
      mesh: of `make_mesh`.
      chunks: `Parallelism.pipe_chunks`.

    Raises:
      ValueError: layers with experts before dense ones, a chunk of a rank in which no rank has a layer, or layers that lie in
        chunks.
    """
    refuse_chunks(params, "to_chunks")
    pipe, stage = PipeShape(mesh.shape["pipe"], chunks), stage_in_pipe(params["stages"])
    check_layers(jax.tree.leaves(params["stages"][stage])[0].shape[0], pipe)

    def lay_out(key_path: tuple, array: Array) -> Array:
        path = parameter_path(key_path)
        if is_dealt_out(path, stage):
            array = split_layers(array, *pipe)
        return jax.device_put(array, parameter_sharding(path, array.shape, mesh))

    return jax.tree.map_with_path(lay_out, params)


def from_chunks(params: nnx.State, num_layers: int, mesh: Mesh | None = None) -> nnx.State:
    """Returns parameters of `to_chunks` with one axis of layers, laid out on another mesh; None: on the default device.

    Args:
      num_layers: the layers that lie in chunks: without dense layers before them, and modules behind them.
    """

    def lay_out(key_path: tuple, array: Array) -> Array:
        path = parameter_path(key_path)
        if lies_in_chunks(path, array.shape):
            array = join_layers(array, num_layers)
        return jax.device_put(array, parameter_sharding(path, array.shape, mesh))

    return jax.tree.map_with_path(lay_out, params)


def pipe_of(mesh: Mesh | None, chunks: int) -> PipeShape:
    """Returns the pipeline over the mesh with these chunks.

    Raises:
      ValueError: less than one chunk, or several without several devices along `pipe`.
    """
    ranks = 1 if mesh is None else mesh.shape.get("pipe", 1)
    if chunks < 1 or (chunks > 1 and ranks == 1):
        raise ValueError(
            f"pipe_chunks must be at least 1, and 1 where the mesh axis pipe has one device; got {chunks} with pipe={ranks}"
        )
    return PipeShape(ranks, chunks)


def pipe_of_model(params: nnx.State, mesh: Mesh | None) -> PipeShape:
    """Returns the pipeline for which the parameters of a model on `mesh` are laid out.

    Raises:
      ValueError: the mesh has several devices along `pipe`, and the layers do not lie in chunks.
    """
    ranks = 1 if mesh is None else mesh.shape.get("pipe", 1)
    if ranks == 1:
        return PipeShape()
    stage = stage_in_pipe(params["stages"])
    for key_path, array in jax.tree.leaves_with_path(params):
        path = parameter_path(key_path)
        if is_dealt_out(path, stage) and not lies_in_chunks(path, array.shape):
            raise ValueError(
                f"the mesh has pipe={ranks}, and the model's layers do not lie in chunks: load it with "
                "from_pretrained(mesh=, pipe_chunks=), or lay it out with parallel.pipeline.chunks.to_chunks"
            )
    return PipeShape(ranks, jax.tree.leaves(params["stages"][stage])[0].shape[0])


def check_layers(num_layers: int, pipe: PipeShape) -> None:
    """Checks that a pipeline's layers fill it; without a pipeline nothing is checked.

    Raises:
      ValueError: a chunk of a rank in which no rank has a layer.
    """
    if pipe.ranks > 1 and not fills_chunks(num_layers, *pipe):
        raise ValueError(
            f"{num_layers} layers do not reach the last of {pipe.chunks} chunks on pipe={pipe.ranks} ranks; take fewer chunks"
        )


def stacked_shape(path: tuple, shape: tuple[int, ...], layers: LayersInPipe, pipe: PipeShape) -> tuple[int, ...]:
    """Returns the shape of a parameter, or of its moment, in `pipe`.

    Args:
      path: as in `nnx.to_flat_state`; () for another array of the optimizer's.
      shape: in any pipeline, or in none.
    """
    if not is_dealt_out(path, layers.stage):
        return shape
    in_chunks = lies_in_chunks(path, shape)
    own = shape[3:] if in_chunks else shape[1:]
    if pipe.ranks == 1:
        return (layers.num_layers, *own) if in_chunks else shape
    return (pipe.chunks, pipe.ranks, layers_of_chunk(layers.num_layers, *pipe), *own)


def is_dealt_out(path: tuple, stage: int) -> bool:
    """Returns whether the parameter's layers are dealt out to ranks. Biases of experts stay whole on every device."""
    return path[:2] == ("stages", stage) and path[-1] != "expert_bias"


def stage_in_pipe(stages: Any) -> int:
    """Returns the number of the stage that lies in a pipeline: the last before modules that predict further tokens.

    Args:
      stages: the parameters of all stages, by number.

    Raises:
      ValueError: layers with experts stand before that stage.
    """
    *before, last = [number for number in sorted(stages) if "eh_proj" not in stages[number]]
    if any("experts" in path for number in before for path, _ in nnx.to_flat_state(stages[number])):
        raise ValueError(
            f"a pipeline deals out a model's last layers of one kind, with dense layers alone before them; this model has "
            f"{len(before) + 1} runs of layers, and experts before the last"
        )
    return last


def refuse_chunks(params: Any, work: str) -> None:
    """Refuses parameters of `to_chunks`, for `work` that needs the layers along one axis.

    Raises:
      ValueError: names the work, a parameter's shape, and what to do.
    """
    for key_path, array in jax.tree.leaves_with_path(params):
        if parameter_path(key_path)[-2:] == ("input_layernorm", "weight") and array.ndim == 4:
            raise ValueError(
                f"{work} needs a model's layers along one axis, and these lie in the chunks of a pipeline: a norm's weights "
                f"have the shape {list(array.shape)} (chunks, ranks, layers of a chunk, hidden). Bring them back first: "
                "nnx.update(model, parallel.pipeline.chunks.from_chunks(nnx.state(model), num_layers))"
            )


def layers_of_chunk(num_layers: int, ranks: int, chunks: int) -> int:
    """Returns the layers of a chunk, l = ceil(layers / (p v))."""
    return -(-num_layers // (ranks * chunks))


def fills_chunks(num_layers: int, ranks: int, chunks: int) -> bool:
    """Returns whether some rank has a layer in its last chunk."""
    return (chunks - 1) * ranks * layers_of_chunk(num_layers, ranks, chunks) < num_layers


def split_layers(stacked: Array, ranks: int, chunks: int) -> Array:
    """Returns [layers, ...] as [chunks, ranks, layers of a chunk, ...], filled up with zeros."""
    of_chunk = layers_of_chunk(stacked.shape[0], ranks, chunks)
    missing = ranks * chunks * of_chunk - stacked.shape[0]
    filled = jnp.pad(stacked, [(0, missing), *[(0, 0)] * (stacked.ndim - 1)]) if missing else stacked
    return filled.reshape(chunks, ranks, of_chunk, *stacked.shape[1:])


def join_layers(split: Array, num_layers: int) -> Array:
    """Returns [chunks, ranks, layers of a chunk, ...] as [layers, ...], without those that were filled up."""
    return split.reshape(-1, *split.shape[3:])[:num_layers]


def layers_of_rank(stacked: Any, ranks: int, chunks: int, rank: Int[Array, ""]) -> Any:
    """Returns the rank's own layers of arrays [layers, ...] as [chunks x layers of a chunk, ...]; `rank` may be traced."""

    def own(array: Array) -> Array:
        part = jax.lax.dynamic_index_in_dim(split_layers(array, ranks, chunks), rank, axis=1, keepdims=False)
        return part.reshape(-1, *part.shape[2:])

    return jax.tree.map(own, stacked)


def layers_of_all_ranks(own: Any, ranks: int, chunks: int, rank: Int[Array, ""]) -> Any:
    """Returns arrays of `layers_of_rank` as [chunks, ranks, layers of a chunk, ...], zeros for the layers of other ranks."""

    def placed(array: Array) -> Array:
        part = array.reshape(chunks, -1, *array.shape[1:])
        whole = vary_as(jnp.zeros((chunks, ranks, *part.shape[1:]), part.dtype), part)
        return jax.lax.dynamic_update_index_in_dim(whole, part, rank, axis=1)

    return jax.tree.map(placed, own)


def sources(schedule: Schedule) -> list[tuple[int, tuple[int, ...]]]:
    """Returns, for each chunk of the schedule, its chunk in `to_chunks`, and for each rank the rank that stores its stage."""
    ranks = len(schedule.stages)
    return [(stages[0] // ranks, tuple(stage % ranks for stage in stages)) for stages in zip(*schedule.stages, strict=True)]


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
