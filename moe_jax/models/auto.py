"""From a config to its model class."""

import jax.numpy as jnp
from flax import nnx

from moe_jax.config import Qwen3Config
from moe_jax.models.qwen3 import Qwen3
from moe_jax.models.qwen3_moe import Qwen3Moe

MODEL_CLASSES: dict[str, type[Qwen3]] = {"qwen3": Qwen3, "qwen3_moe": Qwen3Moe}


def from_config(config: Qwen3Config, *, dtype=jnp.float32, param_dtype=None, rngs: nnx.Rngs) -> Qwen3:
    """A randomly initialised model of the config's architecture; arguments as in `Qwen3`."""
    return MODEL_CLASSES[config.model_type](config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
