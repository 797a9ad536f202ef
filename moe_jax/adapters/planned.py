"""Counts what adapters would train, from a model's config alone."""

from flax import nnx

from moe_jax.adapters.add import add_lora
from moe_jax.adapters.settings import LoraSettings
from moe_jax.adapters.summary import LoraSummary
from moe_jax.config import ModelConfig
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder


def planned_lora(config: ModelConfig, settings: LoraSettings) -> LoraSummary:
    """Returns the summary that `add_lora` would return for a model of this config. No array is made.

    Raises:
      ValueError: as `add_lora`.
    """
    found: list[LoraSummary] = []

    def adapted() -> Decoder:
        model = from_config(config, rngs=nnx.Rngs(0))
        found.append(add_lora(model, settings, rngs=nnx.Rngs(0)))
        return model

    nnx.eval_shape(adapted)
    return found[0]
