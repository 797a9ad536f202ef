"""What attention costs in one layer beside its projections: heads with keys of their own, and latent attention.

Keys have d channels and values e. In latent attention (`layers.latent_attention`) keys and values of all heads are expanded
from a token's latent, which is what travels between devices.
"""

import math

from moe_jax.config import DeepseekV3Config, ModelConfig
from moe_jax.cost.layer import ELEMENT, Passes, matmul_seconds
from moe_jax.cost.machine import Machine


def attention_seconds(tokens: int, keys: float, config: ModelConfig, machine: Machine) -> Passes:
    """2(d + e) FLOPs a key and head forward; backward, whose kernels make the scores twice, 6d + 4e are counted."""
    d, e = config.key_dim, config.value_dim
    pairs = config.num_attention_heads * keys * tokens
    forward = 2 * (d + e) * pairs / machine.attention_forward
    rate = machine.attention_backward if d <= 128 else machine.attention_backward_wide
    return Passes(forward, forward, (6 * d + 4 * e) * pairs / rate)


def expansion_seconds(tokens: int, config: ModelConfig, machine: Machine) -> Passes:
    """Keys and values of all heads, made of latents: a matmul, whose result is read and written as keys and values."""
    if not isinstance(config, DeepseekV3Config):
        return Passes(0.0, 0.0, 0.0)
    matmul = matmul_seconds(tokens, config.kv_lora_rank * _multiplied(config), machine)
    move = ELEMENT * tokens * (_multiplied(config) + key_value_elements(config)) / machine.hbm
    return Passes(matmul.forward + move, matmul.again + move, matmul.backward + 2 * move)


def moved_elements(config: ModelConfig) -> int:
    """Elements of a token that norms and rotary embeddings read and write, expansion included."""
    queries = config.num_attention_heads * config.key_dim
    if isinstance(config, DeepseekV3Config):
        latents = (config.q_lora_rank or 0) + config.kv_lora_rank + config.latent_dim
        return 2 * (queries + latents) + _multiplied(config) + key_value_elements(config)
    return 2 * (queries + config.num_key_value_heads * config.key_dim)


def kept_elements(config: ModelConfig, *, expanded: bool) -> int:
    """Elements of a token that backward keeps: the result, and queries, keys and values.

    Before and after the norm of each head where there is one. In latent attention queries and latents before and after theirs,
    and `expanded` keys and values, unless they are made again of what travels.
    """
    heads = config.num_attention_heads
    queries, out = heads * config.key_dim, heads * config.value_dim
    if isinstance(config, DeepseekV3Config):
        latents = 2 * (config.q_lora_rank or 0) + config.kv_lora_rank + config.latent_dim
        return queries + out + latents + (key_value_elements(config) if expanded else 0)
    return 2 * queries + out + key_value_elements(config) + config.num_key_value_heads * config.key_dim


def travelling_elements(config: ModelConfig) -> int:
    """Elements of a token that queries of other devices need: its keys and values, or its latent."""
    return sum(math.prod(shape) for shape in config.cache_shapes)


def key_value_elements(config: ModelConfig) -> int:
    """Elements of a token's keys and values in all heads that have some."""
    return config.num_key_value_heads * (config.key_dim + config.value_dim)


def expanded_elements(config: ModelConfig) -> int:
    """The same where they are made of what travels, else 0."""
    return key_value_elements(config) if isinstance(config, DeepseekV3Config) else 0


def _multiplied(config: DeepseekV3Config) -> int:
    """Elements of what a token's latent is multiplied to: all of keys and values but the rotary part."""
    return config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
