"""The model of a run that trained adapters: the weights that the run began with, and a checkpoint's adapters beside them."""

from pathlib import Path
from typing import Any

import jax
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
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.train.run_checkpoints import RunCheckpoint
from moe_jax.train.starting_weights import MODEL, same_weights, values_of

LORA = "lora"
"""The entry of a run's identity for its `LoraSettings`, as a JSON object; None in runs of all parameters."""

WEIGHTS = "weights"
"""The entry of a run's identity for the form of its frozen weights, if they were not whole."""

BASE = "base"
"""The entry of a checkpoint's position for the folder or hub id of the frozen weights, which the checkpoint lacks.

None if the run began with a model from memory.
"""


def adapted_model(
    checkpoint: RunCheckpoint,
    *,
    base: str | Path | None,
    dtype: DTypeLike,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Decoder:
    """Reads the base that the checkpoint names, or `base`, and the checkpoint's adapters.

    Raises:
      FileNotFoundError: there is no such base.
      ValueError: the base has other weights than the run began with, or none is named.
    """
    base = checked_base(checkpoint, base)
    model = from_pretrained(base, dtype=dtype, param_dtype=param_dtype, mesh=mesh, mtp=False)
    add_adapters(model, checkpoint)
    return model


def checked_base(checkpoint: RunCheckpoint, base: str | Path | None = None) -> str | Path:
    """Returns `base`, or else the base that the checkpoint names; raises as `adapted_model`."""
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


def add_adapters(model: Decoder, checkpoint: RunCheckpoint) -> None:
    """Adds the checkpoint's adapters to its base, in place.

    Raises:
      ValueError: the run noted values of its base, which was a model from memory, and this model has others.
    """
    noted = checkpoint.position["identity"].get(MODEL)
    if isinstance(noted, list):
        _check(model.source or "this model", noted, values_of(model))
    add_lora(model, lora_settings_of(checkpoint), rngs=nnx.Rngs(0))
    like = {"params": nnx.state(model, nnx.Param), "expert_bias": nnx.state(model, ExpertBias)}
    nnx.update(model, *checkpoint.read_parts(like).values())


def adapters_alone(checkpoint: RunCheckpoint) -> Decoder:
    """Reads the checkpoint's adapters into a model whose other arrays are shapes alone: enough for `save_adapter`."""
    config, settings = config_from_dict(checkpoint.position["identity"]["config"]), lora_settings_of(checkpoint)

    def adapted() -> Decoder:
        model = from_config(config, rngs=nnx.Rngs(0))
        add_lora(model, settings, rngs=nnx.Rngs(0))
        return model

    model = nnx.eval_shape(adapted)

    def place(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter_sharding(path, leaf.shape, None))

    like = jax.tree.map_with_path(place, nnx.state(model, nnx.Param))
    nnx.update(model, checkpoint.read_parts({"params": like})["params"])
    return model


def trained_adapters(checkpoint: RunCheckpoint) -> bool:
    """Returns True if the checkpoint is one of a run that trained adapters."""
    return checkpoint.position["identity"].get(LORA) is not None


def lora_settings_of(checkpoint: RunCheckpoint) -> LoraSettings:
    """Returns the settings of the adapters in a checkpoint."""
    noted = checkpoint.position["identity"][LORA]
    return LoraSettings(**noted | {"targets": None if noted["targets"] is None else tuple(noted["targets"])})


def _check(base: str | Path, noted: Any, found: Any) -> None:
    if not same_weights(noted, found):
        raise ValueError(f"the weights in {base} are not those that the run's adapters were trained beside; give the base")
