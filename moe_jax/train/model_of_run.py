"""Reads the model of an unfinished training run, or of an earlier step, from the run's checkpoints.

For a run that trained adapters, these are the starting weights with a checkpoint's adapters.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.adapters.add import add_lora
from moe_jax.adapters.settings import LoraSettings
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.stored import weights_fingerprint
from moe_jax.config import config_from_dict
from moe_jax.layers.router import ExpertBias
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.layout import parameter_path, parameter_sharding
from moe_jax.parallel.pipeline.chunks import PipeShape, pipe_of, stacked_shape
from moe_jax.train.master_weights import join
from moe_jax.train.rebalance import Places, move_experts
from moe_jax.train.run_checkpoints import RunCheckpoint, open_run, restored
from moe_jax.train.starting_weights import MODEL, same_weights, values_of

ONE_RANK = PipeShape()
"""No pipeline."""

LORA = "lora"
"""Key of a run's identity for its `LoraSettings`, as a JSON object; None if all parameters are trained."""

WEIGHTS = "weights"
"""Key of a run's identity for the form of its frozen weights, if they are not whole."""

BASE = "base"
"""Key of a checkpoint's position for the folder or hub id of the frozen weights, which the checkpoint lacks. None if the run
began with a model from memory.
"""


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
    """Loads the model from a run's checkpoint at `step`, without the optimizer state.

    For a run of adapters, returns the starting weights with the adapters (`adapters.merge_adapter` merges them). If any other
    run has bf16 parameters, a model with f32 parameters gets the masters (`train.master_weights`). The run may have trained on
    any mesh.

    Args:
      run: the output folder of `finetune`.
      step: default: the step of the newest checkpoint.
      dtype, param_dtype, mesh, pipe_chunks: as in `from_pretrained`.
      base: the folder or hub id of the frozen weights, if they are no longer where the run found them.

    Raises:
      FileNotFoundError: `run` has no checkpoints, or none of this step; or its base is not there.
      ValueError: the layers cannot be split over the mesh's pipe. Or the base differs from the weights that the run began with.
    """
    pipe = pipe_of(mesh, pipe_chunks)
    with open_run(run, step) as checkpoint:
        if not trained_adapters(checkpoint):
            return _plain_model(checkpoint, dtype, param_dtype, mesh, pipe)
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, mesh=mesh, pipe_chunks=pipe_chunks)
        model = from_pretrained(checked_base(checkpoint, base), **options, mtp=False)
        add_adapters(model, checkpoint, pipe)
        return model


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


def checked_base(checkpoint: RunCheckpoint, base: str | Path | None = None) -> str | Path:
    """Returns the base model of an adapter run: `base`, or else the one that the checkpoint names.

    Raises:
      FileNotFoundError: there is no such base.
      ValueError: the base differs from the weights that the run began with, or none is named.
    """
    base = base or checkpoint.position.get(BASE)
    if base is None:
        raise ValueError("the run trained adapters of a model from memory, so no checkpoint names its base: give `base`")
    noted = checkpoint.position["identity"].get(MODEL)
    if isinstance(noted, str):
        try:
            found = weights_fingerprint(base)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the weights that the run's adapters belong to are not at {base}: {error}") from error
        _check(base, noted, found)
    return base


def add_adapters(model: Decoder, checkpoint: RunCheckpoint, pipe: PipeShape = ONE_RANK) -> None:
    """Adds the checkpoint's adapters to its base model, in place; its layers are stacked for `pipe`.

    Raises:
      ValueError: the run recorded values of its base, a model from memory, and this model's values differ.
    """
    noted = checkpoint.position["identity"].get(MODEL)
    if isinstance(noted, list):
        _check(model.source or "this model", noted, values_of(model))
    add_lora(model, lora_settings_of(checkpoint), rngs=nnx.Rngs(0))
    like = {"params": nnx.state(model, nnx.Param), "expert_bias": nnx.state(model, ExpertBias)}
    layers = layers_in_pipe(model.config, pipe)
    nnx.update(model, *restored(checkpoint.read_parts, like, layers, checkpoint.position, pipe).values())


def adapters_alone(checkpoint: RunCheckpoint) -> Decoder:
    """Loads only the adapters, into a model whose other arrays are shapes: sufficient for `save_adapter`."""
    config, settings = config_from_dict(checkpoint.position["identity"]["config"]), lora_settings_of(checkpoint)

    def adapted() -> Decoder:
        model = from_config(config, rngs=nnx.Rngs(0))
        add_lora(model, settings, rngs=nnx.Rngs(0))
        return model

    model = nnx.eval_shape(adapted)

    def place(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter_sharding(path, leaf.shape, None))

    like = {"params": jax.tree.map_with_path(place, nnx.state(model, nnx.Param))}
    layers = layers_in_pipe(config, PipeShape())
    nnx.update(model, restored(checkpoint.read_parts, like, layers, checkpoint.position, PipeShape())["params"])
    return model


def trained_adapters(checkpoint: RunCheckpoint) -> bool:
    """Returns True if the checkpoint's run trained adapters."""
    return checkpoint.position["identity"].get(LORA) is not None


def lora_settings_of(checkpoint: RunCheckpoint) -> LoraSettings:
    """Returns the LoRA settings of the checkpoint's adapters."""
    noted: dict[str, Any] = checkpoint.position["identity"][LORA]
    # JSON stores tuples as lists.
    lists = {name: tuple(value) for name, value in noted.items() if isinstance(value, list)}
    return LoraSettings(**noted | lists)


def _check(base: str | Path, noted: Any, found: Any) -> None:
    if not same_weights(noted, found):
        raise ValueError(
            f"the weights in {base} are not the base weights that the run's adapters were trained on; give that base"
        )
