"""Rotary position embeddings (Su et al., 2021, https://arxiv.org/abs/2104.09864): frequencies, scaling and rotation.

Scaling is as in transformers: linear (positions divided by a factor), dynamic (NTK-aware, base
grows with the sequence) and yarn (Peng et al., 2023, https://arxiv.org/abs/2309.00071).
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import RopeParameters
from moe_jax.kernels.shapes import varying_axes


class RopeTables(NamedTuple):
    """cos and sin of position * frequency, f32."""

    cos: Float[Array, "batch seq half"]
    sin: Float[Array, "batch seq half"]


def rope_tables(
    positions: Int[Array, "batch seq"], rope: RopeParameters, head_dim: int, max_position_embeddings: int
) -> RopeTables:
    """Computes cos and sin for these positions, for `apply_rope`.

    The dynamic kind reads the sequence length from the largest position of this call, as transformers does. Inside
    `jax.shard_map` this is the largest position on all devices over which positions vary.
    """
    if rope.rope_type == "dynamic":
        factor = rope.factor or 1.0
        # One base for all tokens: a sequence may be on several devices.
        last = jax.lax.pmax(positions.max(), tuple(sorted(varying_axes(positions))))
        length = jnp.maximum(last + 1, max_position_embeddings).astype(jnp.float32)
        stretch = factor * length / max_position_embeddings - (factor - 1)
        frequencies, magnitude = _frequencies(rope.rope_theta * stretch ** (head_dim / (head_dim - 2)), head_dim), 1.0
    else:
        frequencies, magnitude = fixed_frequencies(rope, head_dim, max_position_embeddings)
    return tables_of(positions, frequencies, magnitude)


def fixed_frequencies(rope: RopeParameters, head_dim: int, max_position_embeddings: int) -> tuple[Float[Array, "half"], float]:
    """Returns the rotary frequencies of every type except "dynamic", and the scale of cos and sin."""
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, max_position_embeddings)
    frequencies = _frequencies(rope.rope_theta, head_dim)
    return frequencies / (rope.factor or 1.0) if rope.rope_type == "linear" else frequencies, 1.0


def tables_of(positions: Int[Array, "batch seq"], frequencies: Float[Array, "half"], magnitude: float) -> RopeTables:
    """Returns cos and sin of position * frequency, each times `magnitude`."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return RopeTables(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def apply_rope(
    x: Float[Array, "batch seq heads head_dim"], rope: RopeTables, *, interleaved: bool = False
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair (x[i], x[i + head_dim/2]) by its angle, in f32; the result has x's dtype.

    Tables for fewer than head_dim numbers rotate only the first numbers of a head.

    Args:
      interleaved: the pairs are (x[2i], x[2i + 1]). The result holds all first numbers of pairs, then all second ones: scores
        do not change if queries and keys have the same order.
    """
    rotary_dim = 2 * rope.cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotated(x, rope, interleaved)
    return jnp.concatenate([_rotated(x[..., :rotary_dim], rope, interleaved), x[..., rotary_dim:]], axis=-1)


# Saves only the tables, which all layers share: else each layer would save them broadcast over heads.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rotated(x: Array, rope: RopeTables, interleaved: bool) -> Array:
    wide = x.astype(rope.cos.dtype)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    cos, sin = rope.cos[:, :, None, :], rope.sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def mscale_of_scores(rope: RopeParameters, max_position_embeddings: int) -> float:
    """Returns DeepSeek's factor on attention scores, (0.1 mscale_all_dim ln(factor) + 1)^2; 1 without RoPE scaling."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    factor = rope.factor if rope.rope_type != "yarn" else rope.yarn_factor(max_position_embeddings)
    assert factor is not None  # checked where the config was read
    return _magnitude(factor, rope.mscale_all_dim) ** 2


def _frequencies(theta, head_dim: int) -> Float[Array, "half"]:
    return 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def _yarn(rope: RopeParameters, head_dim: int, max_position_embeddings: int) -> tuple[Float[Array, "half"], float]:
    """Returns YaRN's frequencies and the factor on cos and sin.

    Fast dimensions keep their frequency, slow ones are divided by `factor`, with a linear ramp between.
    """
    original_length = rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.yarn_factor(max_position_embeddings)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast or 32), dimension_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # If both ends are equal the ramp is a step; a width of 0 would divide by zero.
    width = high - low if high != low else 0.001
    interpolated = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / width, 0, 1)
    plain = _frequencies(rope.rope_theta, head_dim)
    return plain / factor * interpolated + plain * (1 - interpolated), _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: RopeParameters, factor: float) -> float:
    """Returns the factor on cos and sin that keeps attention's entropy: 0.1 ln(factor) + 1 unless the config sets another."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(factor, rope.mscale) / _magnitude(factor, rope.mscale_all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
