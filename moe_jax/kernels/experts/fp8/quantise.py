"""The rounding of rows and matrices to e4m3 with f32 scales, as DeepSeek-V3 rounds them.

Section 3.3 of the DeepSeek-V3 report (https://arxiv.org/abs/2412.19437). For a group of numbers, 128 of a row or 128 x 128 of
a matrix:

    scale = max(largest |x| of the group, 1e-30) * f32(1 / 448)        448 is the largest number of e4m3
    value = e4m3(x * (1 / scale))                                       so x is about value * scale

All in f32, so that a kernel and XLA agree bit for bit. A group with an infinity or a NaN yields NaN when multiplied. Groups of
zeros have a scale above zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Float32, UInt8

from moe_jax.kernels.experts.fp8.precision import Kept
from moe_jax.kernels.shapes import vary_as

GROUP = 128
"""Numbers of a row that share a scale, and rows and columns of a block of a matrix."""

LEAST_MAXIMUM = np.float32(1e-30)
"""Lower bound on a group's largest number: keeps its scale and the inverse of its scale normal f32 numbers."""

INVERSE_LARGEST = np.float32(1 / 448)
"""1 / 448. It is multiplied, not divided by 448: XLA would turn a division by a constant into a product."""


class QuantisedRows(NamedTuple):
    """Rows in e4m3: x[r, i] is about values[r, i] * scales[i // 128, r].

    The scales of a group of columns are contiguous, as kernels copy them for the rows of a tile.
    """

    values: Float8e4m3fn[Array, "rows k"]
    scales: Float[Array, "k/128 rows"]


class QuantisedMatrices(NamedTuple):
    """Matrices in e4m3: w[i, j] is about values[i, j] * scales[i // 128, j // 128]."""

    values: Float8e4m3fn[Array, "*stack n k"]
    scales: Float[Array, "*stack n/128 k/128"]


class InFp8(NamedTuple):
    """Matrices in FP8, with optional transposes for the backward pass (None: computed there)."""

    rounded: QuantisedMatrices
    transposed: QuantisedMatrices | None = None

    def in_both_orders(self) -> "InFp8":
        """Returns a copy with the transposes filled in."""
        return self if self.transposed is not None else InFp8(self.rounded, transposed(self.rounded))


def quantise_rows(x: Float[Array, "rows k"]) -> QuantisedRows:
    """Quantizes rows to e4m3 with one scale per 128 elements of a row; k is a multiple of 128."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    scales = scales_of(jnp.abs(groups).max(axis=-1))
    values = (groups * (1 / scales)[..., None]).astype(jnp.float8_e4m3fn)
    return QuantisedRows(values.reshape(x.shape), scales.T)


def quantise_matrices(w: Float[Array, "*stack n k"]) -> QuantisedMatrices:
    """Quantizes matrices to e4m3 with one scale per 128 x 128 block; n and k are multiples of 128."""
    *stack, n, k = w.shape
    blocks = w.astype(jnp.float32).reshape(*stack, n // GROUP, GROUP, k // GROUP, GROUP)
    scales = scales_of(jnp.abs(blocks).max(axis=(-3, -1)))
    values = (blocks * (1 / scales)[..., :, None, :, None]).astype(jnp.float8_e4m3fn)
    return QuantisedMatrices(values.reshape(w.shape), scales)


def transposed(w: QuantisedMatrices) -> QuantisedMatrices:
    """Returns the transposes of matrices; their blocks have the same scales, so nothing is rounded again."""
    return QuantisedMatrices(w.values.mT, w.scales.mT)


def dequantised_rows(rows: QuantisedRows) -> Float[Array, "rows k"]:
    """Returns values * scales in f32, [rows, k]."""
    return rows.values.astype(jnp.float32) * jnp.repeat(rows.scales.T, GROUP, axis=1)


def refusal(dtype: jnp.dtype, hidden: int, inter: int) -> str | None:
    """Returns why FP8 does not support such experts, with the supported sizes; None if it does."""
    if dtype != jnp.bfloat16:
        return f"x is {jnp.dtype(dtype).name}; it must be bfloat16"
    for name, size in (("hidden", hidden), ("inter", inter)):
        if size % GROUP or not size:
            return f"{name} is {size}; it must be a multiple of {GROUP}, the numbers that share a scale"
    return None


def scales_of(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the quantization scales of groups with these absolute maxima."""
    return jnp.maximum(largest, LEAST_MAXIMUM) * INVERSE_LARGEST


def joined(w: QuantisedMatrices) -> QuantisedMatrices:
    """Reshapes stacked matrices [layers, experts, ...] to [layers * experts, ...], which `Plan.in_stack` indexes."""
    return QuantisedMatrices(*(part.reshape(-1, *part.shape[-2:]) for part in w))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedTokens:
    """Tokens received in FP8, passed in place of a bf16 array; a placeholder array receives their gradient."""

    rounded: QuantisedRows
    like: BFloat16[Array, "tokens hidden"]
    """NaN in the shape of the tokens, since nothing may read it. Its gradient is the tokens' gradient."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        return self.like.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the tokens' gradient."""
        return self.like.dtype

    @classmethod
    def of(cls, rounded: QuantisedRows) -> "RoundedTokens":
        """Wraps quantized tokens, with a bf16 placeholder for their gradient."""
        return cls(rounded, vary_as(jnp.full(rounded.values.shape, jnp.nan, jnp.bfloat16), rounded))

    def split(self, ends: Sequence[int]) -> list["RoundedTokens"]:
        """Splits the tokens into parts, like `jnp.split`."""
        values, like = (jnp.split(a, ends) for a in (self.rounded.values, self.like))
        scales = jnp.split(self.rounded.scales, ends, axis=1)
        return [RoundedTokens(QuantisedRows(*part[:2]), part[2]) for part in zip(values, scales, like, strict=True)]


KEPT_INVERSE_LARGEST = np.float32(1 / 15.5)
"""One over the largest number of e3m4."""


class KeptRows(NamedTuple):
    """The residual h = [gate | up] in e3m4: h[r, i] is about values[r, i] * scales[r, i // 128], with values of these codes.

    No tensor core multiplies the kept rows, so their 8 bits need not be e4m3. e3m4 has one more mantissa bit, and numbers down
    to 1/992 of a group's largest: half the error in the same bytes.
    """

    codes: UInt8[Array, "rows k"]
    scales: Float[Array, "rows k/128"]


def keep_h(h: BFloat16[Array, "rows k"], form: Kept) -> BFloat16[Array, "rows k"] | KeptRows:
    """Converts h to the form saved for the backward pass: unchanged, or 8 bits with one scale per 128 elements."""
    if form == "bf16":
        return h
    groups = h.astype(jnp.float32).reshape(h.shape[0], h.shape[1] // GROUP, GROUP)
    scales = kept_scales_of(jnp.abs(groups).max(axis=-1))
    values = e3m4_codes(groups * (1 / scales)[..., None])
    return KeptRows(values.reshape(h.shape), scales)


def kept_scales_of(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the scales of groups of h with these absolute maxima."""
    return jnp.maximum(largest, LEAST_MAXIMUM) * KEPT_INVERSE_LARGEST


def read_h(kept: Float[Array, "rows k"] | KeptRows) -> Float[Array, "rows k"]:
    """Inverts `keep_h`: returns h, in bf16 if it was kept in 8 bits."""
    if not isinstance(kept, KeptRows):
        return kept
    return (of_e3m4_codes(kept.codes) * jnp.repeat(kept.scales, GROUP, axis=1)).astype(jnp.bfloat16)


def e3m4_codes(values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Rounds to e3m4 and returns its bits: a sign, 3 bits of exponent with bias 3, 4 bits of mantissa.

    The bits are `astype(jnp.float8_e3m4)`'s for numbers up to 15.5. GPUs have no such conversion, and XLA's took four times as
    long as the reads and writes. It would also remove a conversion and its inverse, so that h would stay unrounded.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    # To the nearest, ties to even: the sum carries into the exponent.
    normal = ((magnitude + 0x3FFFF + ((magnitude >> 19) & 1)) >> 19) - ((127 - 3) << 4)
    # Below 1/4 the numbers are multiples of 1/64, which is the distance of f32 numbers at 2^17.
    small = lax.bitcast_convert_type(jnp.abs(values) + np.float32(2**17), jnp.uint32) & 0xFF
    code = jnp.where(magnitude < _QUARTER, small, jnp.where(jnp.isnan(values), 0x78, normal))
    return (code | (bits >> 31 << 7)).astype(jnp.uint8)


def of_e3m4_codes(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the numbers that have these bits in e3m4."""
    bits = codes.astype(jnp.uint32)
    magnitude = bits & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 19) + ((127 - 3) << 23), jnp.float32)
    # With an exponent of 0 there is no leading 1, and the exponent is that of 1.
    value = jnp.where(magnitude < 16, 2 * normal - 0.25, jnp.where(magnitude > 0x70, jnp.nan, normal))
    return jnp.where(bits > 0x7F, -value, value)


_QUARTER = np.float32(0.25).view(np.uint32)
