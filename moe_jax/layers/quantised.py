"""Frozen matrices in fewer bytes: 8 bits with a scale for each block, or 4 bits with a scale for each group of a row.

A quantised matrix replaces the array of a `layers.lora.Frozen`. Its `[...]` returns the dequantised matrix in `dtype`. A layer
dequantises it when it computes. Loops over stacked layers slice codes and scales: one layer is dequantised at a time.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int, UInt8

from moe_jax.kernels.experts.fp8.quantise import GROUP, quantise_matrices

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of NF4, quantiles of a normal distribution (Dettmers et al., 2023, https://arxiv.org/abs/2305.14314)."""

FP8_BLOCK = (GROUP, GROUP)
"""Rows and columns that share a scale in FP8, as DeepSeek-V3 was trained."""

NF4_BLOCK = 64
"""Numbers of a row that share a scale in NF4."""

INT4_VALUES = tuple(float(code - 8) for code in range(16))
"""The values of symmetric codes, as GPTQ has them."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of e2m1 (https://arxiv.org/abs/2310.10537): a sign, two bits of exponent and one of mantissa."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
    """Matrices in e4m3 with one f32 scale per block, as hub files store them (`checkpoint.quantised`).

    w[i, j] = codes[i, j] * scales[i // block, j // block], in f32, rounded once to `dtype`.
    """

    codes: Float8e4m3fn[Array, "*stack rows columns"]
    scales: Float[Array, "*stack row_blocks column_blocks"]
    dtype: Any = field(metadata={"static": True})
    block: tuple[int, int] = field(metadata={"static": True}, default=FP8_BLOCK)

    @classmethod
    def fp8(cls, w: Float[Array, "*stack rows columns"], dtype: DTypeLike) -> Self:
        """Quantizes matrices to e4m3 with one scale per 128 x 128 block, as `kernels.quantise_matrices`."""
        return cls(*quantise_matrices(w), jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised matrices."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the dequantised matrices."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of elements of the dequantised matrices."""
        return self.codes.size

    def __getitem__(self, key: Any) -> Float[Array, "*stack rows columns"]:
        """Returns the dequantised matrices; `key` is `...`."""
        _only_whole(key)
        scales = self.scales
        for axis, block in zip((-2, -1), self.block, strict=True):
            scales = jnp.repeat(scales, block, axis=axis)
        *_, rows, columns = self.shape
        return (self.codes.astype(jnp.float32) * scales[..., :rows, :columns]).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FourBits:
    """Matrices in 4 bits: w[i, j] = values[code[i, j]] * scales[i, j // block], in f32, rounded once to `dtype`.

    Attributes:
      codes: two codes per byte, the first in the high half.
      scales: one for each block of a row; in NF4 the block's largest absolute value.
      values: the values of the 16 codes.
    """

    codes: UInt8[Array, "*stack rows half_columns"]
    scales: Float[Array, "*stack rows blocks"]
    dtype: Any = field(metadata={"static": True})
    values: tuple[float, ...] = field(metadata={"static": True}, default=NF4_VALUES)
    block: int = field(metadata={"static": True}, default=NF4_BLOCK)

    @classmethod
    def nf4(cls, w: Float[Array, "*stack rows columns"], dtype: DTypeLike) -> Self:
        """Quantizes matrices to NF4: elements are divided by their block's absolute maximum, then rounded to the nearest value.

        Raises:
          ValueError: a row's length is not a multiple of 64.
        """
        if w.shape[-1] % NF4_BLOCK:
            raise ValueError(f"NF4 has one scale per {NF4_BLOCK} elements of a row; a row of {list(w.shape)} is no multiple")
        blocks = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, NF4_BLOCK)
        scales = jnp.abs(blocks).max(axis=-1)
        normed = blocks / jnp.where(scales == 0, 1, scales)[..., None]
        middles = [(low + high) / 2 for low, high in zip(NF4_VALUES, NF4_VALUES[1:], strict=False)]
        below = [(normed > middle).astype(jnp.uint8) for middle in middles]
        codes = sum(below[1:], start=below[0]).reshape(w.shape)
        return cls(codes[..., ::2] << 4 | codes[..., 1::2], scales, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised matrices."""
        return *self.codes.shape[:-1], 2 * self.codes.shape[-1]

    @property
    def ndim(self) -> int:
        """The number of axes of the dequantised matrices."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of elements of the dequantised matrices."""
        return 2 * self.codes.size

    def __getitem__(self, key: Any) -> Float[Array, "*stack rows columns"]:
        """Returns the dequantised matrices; `key` is `...`."""
        _only_whole(key)
        codes = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1).reshape(*self.scales.shape, self.block)
        values = jnp.asarray(self.values, jnp.float32)[codes]
        return (values * self.scales[..., None].astype(jnp.float32)).reshape(self.shape).astype(self.dtype)


Quantised = BlockScaled | FourBits


def matrices_of(state: Any) -> list[Any]:
    """Returns the arrays of a model or state, with each quantised matrix as one item."""
    return [matrix for _, matrix in matrices_with_path(state)]


def matrices_with_path(state: Any) -> list[tuple[tuple, Any]]:
    """Returns `matrices_of` a state, each with its path."""
    return jax.tree.leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, Quantised))


def splittable(matrix: Any) -> tuple[int, ...]:
    """Returns the shape by which a matrix is split over devices: a quantised matrix's in blocks, since parts keep blocks whole.

    Codes and scales of a quantised matrix are split alike. An axis whose last block is not full is not split.
    """
    if not isinstance(matrix, Quantised):
        return matrix.shape
    blocks = matrix.block if isinstance(matrix, BlockScaled) else (1, matrix.block)
    axes = zip(matrix.shape[-2:], matrix.scales.shape[-2:], blocks, strict=True)
    return *matrix.shape[:-2], *(n if size == n * block else 1 for size, n, block in axes)


def is_quantised(state: Any) -> bool:
    """Returns True if an array of the state is quantised."""
    return any(isinstance(leaf, Quantised) for leaf in matrices_of(state))


def of_stack(stack: Any, layer: Int[Array, ""]) -> Any:
    """Slices one layer from a stack of matrices; a quantised matrix stays quantised."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False), stack)


def _only_whole(key: Any) -> None:
    if key is not Ellipsis:
        raise IndexError(f"quantised matrices are read as a whole, weight[...]; got index {key!r}")
