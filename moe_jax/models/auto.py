"""Model classes by type: chooses the class of a config, and describes its parameters without making them."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from moe_jax.config import DeepseekV3Config, ModelConfig, Qwen3Config, Qwen3MoeConfig
from moe_jax.models.decoder import Decoder


class Qwen3(Decoder):
    """A Qwen3 language model (https://arxiv.org/abs/2505.09388); arguments and calls as `Decoder`."""

    config: Qwen3Config


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE language model; arguments and calls as `Decoder`. Layers not in `config.moe_layers` are dense."""

    config: Qwen3MoeConfig


class DeepseekV3(Decoder):
    """A DeepSeek-V3 (https://arxiv.org/abs/2412.19437) or V2 language model; arguments and calls as `Decoder`."""

    config: DeepseekV3Config


MODEL_CLASSES: dict[str, type[Decoder]] = {
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "deepseek_v2": DeepseekV3,
    "deepseek_v3": DeepseekV3,
    "kimi_k2": DeepseekV3,
}
"""{model type: its own class}. All other types use `Decoder`, which builds the config's specs."""


@functools.cache
def abstract_parameters(config: ModelConfig) -> Mapping[tuple, nnx.Variable]:
    """Returns the parameters of the config's model by path, as variables that hold shapes instead of arrays."""
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    return MappingProxyType(dict(nnx.to_flat_state(nnx.state(model))))


def from_config(
    config: ModelConfig, *, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike | None = None, rngs: nnx.Rngs
) -> Decoder:
    """Builds a randomly initialised model of the config's architecture; arguments as in `Decoder`."""
    return MODEL_CLASSES.get(config.model_type, Decoder)(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
