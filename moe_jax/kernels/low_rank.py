"""The low-rank change of a matrix: W + b a, where only the factors are trained (LoRA, https://arxiv.org/abs/2106.09685)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, UInt32


class LowRank(NamedTuple):
    """LoRA factors of a matrix update b a [out, in], or of one per expert; b includes any scale."""

    a: Float[Array, "*experts rank in"]
    b: Float[Array, "*experts out rank"]


class LowRankOfRows(NamedTuple):
    """LoRA factors of several updates of a matrix side by side, where each row of x has one of them or none."""

    a: Float[Array, "ranks in"]
    b: Float[Array, "out ranks"]
    kept: Bool[Array, "*batch ranks"]
    """True for the columns of a row's own update."""


class RowsChange(NamedTuple):
    """A LoRA update after its first matmul: adds rows[r] @ factor[e].T to row r of expert e's output.

    If the matrix is used transposed, so is the factor, which is then [experts, rank, out]: rows[r] @ factor[e].
    """

    rows: Float[Array, "rows rank"]
    factor: Float[Array, "experts out rank"]


class Dropout(NamedTuple):
    """LoRA dropout on a's input: drops each element with probability `rate`, redrawn from the token's seed on each use.

    The same seed drops the same elements: in a layer recomputed in the backward pass, and on any device.
    """

    seeds: UInt32[Array, "*tokens"]
    """One for each token of the input. For other numbers of tokens, the first one's mask covers the whole input."""
    rate: float | Float[Array, ""]

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch in"]:
        """Returns x with dropped elements zero, and the others divided by 1 - rate."""
        *tokens, size = x.shape
        keys = jnp.stack([self.seeds.ravel(), jnp.zeros_like(self.seeds.ravel())], axis=-1)
        if math.prod(tokens) == len(keys):
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, (size,)))(keys).reshape(x.shape)
        else:
            kept = jax.random.bernoulli(keys[0], 1 - self.rate, x.shape)
        return jnp.where(kept, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros((), x.dtype))


def low_rank_map(
    x: Float[Array, "*batch in"],
    factors: LowRank | LowRankOfRows,
    out_dtype: DTypeLike | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "*batch out"]:
    """Computes the LoRA update x (b a)^T as (x a^T) b^T, in x's dtype; the result has `out_dtype`, by default x's."""
    x = x if dropout is None else dropout(x)
    inner = own_columns(jnp.einsum("...i,ri->...r", x, factors.a.astype(x.dtype)), factors)
    return jnp.einsum("...r,or->...o", inner, factors.b.astype(x.dtype), preferred_element_type=out_dtype)


def own_columns(
    inner: Float[Array, "*batch_and_heads ranks"], factors: LowRank | LowRankOfRows
) -> Float[Array, "*batch_and_heads ranks"]:
    """Returns x a^T with zeros in the columns of updates that are not the row's own."""
    if isinstance(factors, LowRank):
        return inner
    heads = range(factors.kept.ndim - 1, inner.ndim - 1)
    return jnp.where(jnp.expand_dims(factors.kept, tuple(heads)), inner, 0)
