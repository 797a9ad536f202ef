"""Pages of keys or values in FP8: e4m3 codes, and a power of two for each token and key head.

    exponent = the smallest with max |x| of the head <= 448 * 2^(exponent - 127)        448 is the largest number of e4m3
    code     = e4m3(x * 2^(127 - exponent))                                            so x is about code * 2^(exponent - 127)

A head of 128 columns has 129 bytes, where bf16 has 256. A code has 4 significant bits, and the power of two rounds nothing. So
bf16 holds what a page means exactly. Attention to such a page has the bits of attention to the same numbers in bf16. A token's
codes depend on the token alone, not on other tokens of its page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int, UInt8

F8 = jnp.float8_e4m3fn


class FP8Pages(NamedTuple):
    """One layer's pages of keys, or of values."""

    codes: Float8e4m3fn[Array, "pages kv_heads 64 width"]
    exponents: UInt8[Array, "pages kv_heads 64"]
    """Biased by 127, as in an f32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the numbers."""
        return self.codes.ndim


Pages = Float[Array, "pages _ 64 _"] | FP8Pages
"""One layer's pages of keys, or of values, in a model's dtype or in FP8."""


def empty(shape: tuple[int, ...], dtype: DTypeLike, *, in_fp8: bool) -> Pages:
    """Returns pages of zeros."""
    return FP8Pages(jnp.zeros(shape, F8), jnp.zeros(shape[:3], jnp.uint8)) if in_fp8 else jnp.zeros(shape, dtype)


def exponent_of(largest_bits: Int[Array, "*heads"]) -> Int[Array, "*heads"]:
    """Returns the exponent for these bits of an f32, the largest absolute value of a head. Works inside kernels too."""
    # 448 is 1.75 * 2^8: a larger significand needs the next power of two.
    return jnp.maximum(((largest_bits + 0x1FFFFF) >> 23) - 8, 1)


def power_of_two(exponent: Int[Array, "*heads"]) -> Float[Array, "*heads"]:
    """Returns 2^(exponent - 127) in f32. Kernels of jax 0.11 refuse this for a single number."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def bits_of_magnitudes(x: Float[Array, "*heads width"]) -> Int[Array, "*heads width"]:
    """Returns the bits of |x| in f32, which are ordered as the numbers are."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF


def quantised(x: Float[Array, "*heads width"]) -> tuple[Float8e4m3fn[Array, "*heads width"], UInt8[Array, "*heads"]]:
    """Returns codes and exponents of heads."""
    exponent = exponent_of(bits_of_magnitudes(x).max(axis=-1))
    return (x.astype(jnp.float32) * power_of_two(254 - exponent)[..., None]).astype(F8), exponent.astype(jnp.uint8)


def written(
    pages: Pages, page: Int[Array, "tokens"], offset: Int[Array, "tokens"], heads: Float[Array, "tokens kv_heads width"]
) -> Pages:
    """Returns the pages with each token's heads at its page and offset."""
    if not isinstance(pages, FP8Pages):
        return pages.at[page, :, offset].set(heads.astype(pages.dtype), mode="drop")
    return FP8Pages(*(a.at[page, :, offset].set(b, mode="drop") for a, b in zip(pages, quantised(heads), strict=True)))


def read(pages: Pages, page: Int[Array, "*some"], dtype: DTypeLike) -> Float[Array, "*some kv_heads 64 width"]:
    """Returns copies of some pages, as numbers of a dtype."""
    if not isinstance(pages, FP8Pages):
        return pages[page].astype(dtype)
    powers = power_of_two(pages.exponents[page].astype(jnp.int32))
    return (pages.codes[page].astype(jnp.float32) * powers[..., None]).astype(dtype)
