"""Tokens of which a device has the rounded values alone: those that travelled in FP8."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.fp8.quantise import QuantisedRows
from moe_jax.kernels.varying import vary_as


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedTokens:
    """Tokens in FP8 in place of an array of tokens, with a place for the tokens' gradient."""

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
        """Returns tokens whose gradient is bf16."""
        return cls(rounded, vary_as(jnp.full(rounded.values.shape, jnp.nan, jnp.bfloat16), rounded))

    def split(self, ends: Sequence[int]) -> list["RoundedTokens"]:
        """Returns the tokens in parts, as `jnp.split` does."""
        values, like = (jnp.split(a, ends) for a in (self.rounded.values, self.like))
        scales = jnp.split(self.rounded.scales, ends, axis=1)
        return [RoundedTokens(QuantisedRows(*part[:2]), part[2]) for part in zip(values, scales, like, strict=True)]
