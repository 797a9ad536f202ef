"""The model of a training run that has not ended, or of an earlier step of one that has, from the run's checkpoints."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.config import config_from_dict
from moe_jax.layers.router import ExpertBias
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.layout import parameter_path, parameter_sharding
from moe_jax.parallel.pipeline.chunks import PipeShape, pipe_of, stacked_shape
from moe_jax.train.adapted_run import adapted_model, trained_adapters
from moe_jax.train.master_weights import join
from moe_jax.train.rebalance import Places, move_experts
from moe_jax.train.restored import restored
from moe_jax.train.run_checkpoints import RunCheckpoint, open_run


def model_of_run(
    run: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    pipe_chunks: int = 1,
    base: str | Path | None = None,
) -> Decoder:
    """Reads the model from the checkpoint of `step`, without the optimizer's state.

    A run of adapters gives the weights that it began with, and the adapters beside them (`adapters.merge_adapter` adds them).
    If another run has bf16 parameters, a model with f32 parameters gets the masters (`train.master_weights`). The run may have
    trained on any mesh.

    Args:
      run: the output folder of `finetune`.
      step: default: the step of the newest checkpoint.
      dtype, param_dtype, mesh, pipe_chunks: as in `from_pretrained`.
      base: the folder or hub id of the weights beside adapters, if they are no longer where the run found them.

    Raises:
      FileNotFoundError: `run` has no checkpoints, or none of this step; or its base is not there.
      ValueError: the layers cannot lie in the mesh's pipe. Or the base has other weights than the run began with.
    """
    pipe = pipe_of(mesh, pipe_chunks)
    with open_run(run, step) as checkpoint:
        if not trained_adapters(checkpoint):
            return _plain_model(checkpoint, dtype, param_dtype, mesh, pipe)
        if pipe.ranks > 1:
            raise ValueError(f"{run} trained adapters, which do not lie in a pipe: take a mesh without pipe")
        return adapted_model(checkpoint, base=base, dtype=dtype, param_dtype=param_dtype, mesh=mesh)


def _plain_model(
    checkpoint: RunCheckpoint, dtype: DTypeLike, param_dtype: DTypeLike | None, mesh: Mesh | None, pipe: PipeShape
) -> Decoder:
    position = checkpoint.position
    config = config_from_dict(position["identity"]["config"])
    layers = layers_in_pipe(config, pipe)

    param_dtype = jnp.dtype(dtype if param_dtype is None else param_dtype)
    in_halves = param_dtype == jnp.float32 and position["identity"]["param_dtype"] == "bfloat16"
    abstract = nnx.eval_shape(lambda: from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graph, *abstract_parts = nnx.split(abstract, nnx.Param, ExpertBias)

    def place(key_path, leaf):
        path = parameter_path(key_path)
        shape = stacked_shape(path, leaf.shape, layers, pipe)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=parameter_sharding(path, shape, mesh))

    names = "params", "expert_bias"
    like = {name: jax.tree.map_with_path(place, part) for name, part in zip(names, abstract_parts, strict=True)}
    if in_halves:
        like["low_halves"] = jax.tree.map(lambda master: master.update(dtype=jnp.int16), like["params"])
        like["params"] = jax.tree.map(lambda master: master.update(dtype=jnp.bfloat16), like["params"])
    found = restored(checkpoint.read_parts, like, layers, position, pipe)
    if in_halves:
        found["params"] = join(found["params"], found["low_halves"])
    parts = [found[name] for name in names]
    if position.get("places"):
        parts = move_experts(parts, config, Places.from_json(position["places"]).back)
    return nnx.merge(graph, *parts)
