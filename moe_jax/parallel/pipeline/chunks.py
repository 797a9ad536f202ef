"""The layers of a pipeline: [layers, ...] becomes [chunks, ranks, layers of a chunk, ...]; `pipe` splits the second axis.

Rank r of p holds chunk c, the layers (c p + r) l to (c p + r) l + l - 1. The order of the layers stays, so the change is a
reshape. If v p l layers are more than the model has, the last are zeros. A layer of zeros adds nothing to the residual stream
and gets no gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.layout import lies_in_chunks, parameter_path, parameter_sharding


def to_chunks(params: nnx.State, mesh: Mesh, chunks: int = 1) -> nnx.State:
    """Lays a model's parameters out for a pipeline over the mesh axis `pipe`, one array after the other.

        nnx.update(model, to_chunks(nnx.state(model), mesh, chunks=2))
        state = train.init_state(model, optimizer)

    Biases of experts stay whole on every device, in the order of the layers. The model can only be trained now.

    Args:
      params: `nnx.state(model)`. Of DeepSeek-V3 the layers with experts lie in chunks, and the rest as on any mesh.
      mesh: of `make_mesh`.
      chunks: `Parallelism.pipe_chunks`.

    Raises:
      ValueError: layers with experts before dense ones, a chunk of a rank in which no rank has a layer, or layers that lie in
        chunks.
    """
    refuse_chunks(params, "to_chunks")
    ranks = mesh.shape["pipe"]
    stage = stage_in_pipe(params["stages"])
    num_layers = jax.tree.leaves(params["stages"][stage])[0].shape[0]
    if not fills_chunks(num_layers, ranks, chunks):
        raise ValueError(
            f"{num_layers} layers do not reach the last of {chunks} chunks on pipe={ranks} ranks; take fewer chunks"
        )

    def lay_out(key_path: tuple, array: Array) -> Array:
        path = parameter_path(key_path)
        if path[:2] == ("stages", stage) and path[-1] != "expert_bias":
            array = split_layers(array, ranks, chunks)
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
