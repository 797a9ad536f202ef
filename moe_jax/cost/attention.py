"""Cost of attention in one layer without its projections, for multi-head and latent attention.

Keys have d channels and values e. In latent attention (`layers.latent_attention`) the keys and values of all heads are expanded
from a token's latent. Then only the latent travels between devices.
"""

import math

from moe_jax.config import DeepseekV3Config, ModelConfig
from moe_jax.cost.layer import ELEMENT, Passes, matmul_seconds
from moe_jax.cost.machine import Machine


def attention_seconds(tokens: int, keys: float, config: ModelConfig, machine: Machine) -> Passes:
    """Returns the seconds of the attention kernels.

    FLOPs for each key and head: 2(d + e) forward, 6d + 4e backward, although the backward kernels compute the scores twice.

    Args:
      tokens: queries.
      keys: mean number of keys that a query attends to.
    """
    d, e = config.key_dim, config.value_dim
    pairs = config.num_attention_heads * keys * tokens
    forward = 2 * (d + e) * pairs / machine.attention_forward
    rate = machine.attention_backward if d <= 128 else machine.attention_backward_wide
    return Passes(forward, forward, (6 * d + 4 * e) * pairs / rate)


def expansion_seconds(tokens: int, config: ModelConfig, machine: Machine) -> Passes:
    """Returns the seconds to expand latents to the keys and values of all heads; 0 without latent attention.

    This is a matmul, whose result is read once and written as keys and values.
    """
    if not isinstance(config, DeepseekV3Config):
        return Passes(0.0, 0.0, 0.0)
    matmul = matmul_seconds(tokens, config.kv_lora_rank * _expanded_width(config), machine)
    move = ELEMENT * tokens * (_expanded_width(config) + key_value_elements(config)) / machine.hbm
    return Passes(matmul.forward + move, matmul.again + move, matmul.backward + 2 * move)


def moved_elements(config: ModelConfig) -> int:
    """Returns the elements of a token that norms, rotary embeddings and the expansion of latents read and write."""
    queries = config.num_attention_heads * config.key_dim
    if isinstance(config, DeepseekV3Config):
        latents = (config.q_lora_rank or 0) + config.kv_lora_rank + config.latent_dim
        return 2 * (queries + latents) + _expanded_width(config) + key_value_elements(config)
    return 2 * (queries + config.num_key_value_heads * config.key_dim)


def kept_elements(config: ModelConfig, *, expanded: bool) -> int:
    """Returns the elements of a token in attention's residuals: the result, queries, keys and values.

    Multi-head attention keeps queries and keys before and after their norms. Latent attention keeps queries and latents, before
    and after their norms. If `expanded`, it keeps the expanded keys and values too; else they are recomputed from latents.
    """
    heads = config.num_attention_heads
    queries, out = heads * config.key_dim, heads * config.value_dim
    if isinstance(config, DeepseekV3Config):
        latents = 2 * (config.q_lora_rank or 0) + config.kv_lora_rank + config.latent_dim
        return queries + out + latents + (key_value_elements(config) if expanded else 0)
    return 2 * queries + out + key_value_elements(config) + config.num_key_value_heads * config.key_dim


def travelling_elements(config: ModelConfig) -> int:
    """Returns the elements of a token that are sent to the queries of other devices: keys and values, or the latent."""
    return sum(math.prod(shape) for shape in config.cache_shapes)


def key_value_elements(config: ModelConfig) -> int:
    """Returns the elements of a token's keys and values in all key-value heads."""
    return config.num_key_value_heads * (config.key_dim + config.value_dim)


def expanded_elements(config: ModelConfig) -> int:
    """Returns `key_value_elements` for latent attention, which expands them from latents; else 0."""
    return key_value_elements(config) if isinstance(config, DeepseekV3Config) else 0


def _expanded_width(config: DeepseekV3Config) -> int:
    """Returns the elements that a token's latent is expanded to: keys and values without the rotary part."""
    return config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
