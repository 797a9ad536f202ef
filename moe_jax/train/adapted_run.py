"""The model of a run that trained adapters: the weights that the run began with, and a checkpoint's adapters beside them."""

from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.adapters.add import add_lora
from moe_jax.adapters.settings import LoraSettings
from moe_jax.checkpoint.fingerprint import weights_fingerprint
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.layers.router import ExpertBias
from moe_jax.models.decoder import Decoder
from moe_jax.train.starting_weights import MODEL, same_weights, values_of

LORA = "lora"
"""The entry of a run's identity for its `LoraSettings`, as a JSON object; None in runs of all parameters."""

BASE = "base"
"""The entry of a checkpoint's position for the folder or hub id of the frozen weights, which the checkpoint lacks.

None if the run began with a model from memory.
"""


def adapted_model(
    checkpoints: TrainingCheckpoints,
    step: int,
    *,
    base: str | Path | None,
    dtype: DTypeLike,
    param_dtype: DTypeLike | None,
    mesh: Mesh | None,
) -> Decoder:
    """Reads the base that the checkpoint names, or `base`, and the checkpoint's adapters.

    Raises:
      FileNotFoundError: there is no such base.
      ValueError: the base has other weights than the run began with, or none is named.
    """
    position = checkpoints.position(step)
    base = base or position.get(BASE)
    if base is None:
        raise ValueError("the run trained adapters of a model from memory, so no checkpoint names its base: give `base`")
    noted = position["identity"].get(MODEL)
    if isinstance(noted, str):
        _check(base, noted, _fingerprint(base))
    model = from_pretrained(base, dtype=dtype, param_dtype=param_dtype, mesh=mesh, mtp=False)
    if isinstance(noted, list):
        _check(base, noted, values_of(model))
    add_lora(model, lora_settings_of(position), rngs=nnx.Rngs(0))
    like = {"params": nnx.state(model, nnx.Param), "expert_bias": nnx.state(model, ExpertBias)}
    found = checkpoints.restore_parts(step, like)
    nnx.update(model, *found.values())
    return model


def lora_settings_of(position: dict[str, Any]) -> LoraSettings:
    """Returns the settings of the adapters in a checkpoint."""
    noted = position["identity"][LORA]
    return LoraSettings(**noted | {"targets": None if noted["targets"] is None else tuple(noted["targets"])})


def _fingerprint(base: str | Path) -> str:
    try:
        return weights_fingerprint(base)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the weights that the run's adapters belong to are not at {base}: {error}") from error


def _check(base: str | Path, noted: Any, found: Any) -> None:
    if not same_weights(noted, found):
        raise ValueError(f"the weights in {base} are not those that the run's adapters were trained beside; give the base")
