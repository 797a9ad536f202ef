"""Weights of experts of which a device has the rounded values alone: those that were gathered in FP8."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.experts.fp8.passes import QuantisedExperts
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fused_vjp import Matrices
from moe_jax.kernels.varying import vary_as


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedWeights:
    """Matrices in FP8 in place of an array of weights, with a place for the weights' gradient."""

    rounded: QuantisedMatrices
    like: Float[Array, "experts n k"]
    """NaN in the shape and dtype of the weights, since nothing may read it. Its gradient is the weights' gradient."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return self.like.shape

    @classmethod
    def of(cls, rounded: QuantisedMatrices, dtype: jnp.dtype) -> "RoundedWeights":
        """Returns weights whose gradients have this dtype."""
        return cls(rounded, like_weights(rounded, dtype, jnp.nan))

    def __getitem__(self, key: Any) -> "RoundedWeights":
        """Returns the weights for weights[...], as modules read them.

        Raises:
            IndexError: another index.
        """
        if key is not Ellipsis:
            raise IndexError(f"weights that are rounded are read as a whole, weight[...]; got index {key!r}")
        return self


def like_weights(rounded: QuantisedMatrices, dtype: jnp.dtype, fill: float) -> Float[Array, "experts n k"]:
    """Returns an array of one number in the shape of the matrices."""
    return vary_as(jnp.full(rounded.values.shape, fill, dtype), rounded.values)


def weights_and_copies(w_gate_up: Any, w_down: Any) -> tuple[Matrices, QuantisedExperts | None]:
    """Returns what gets the gradients of the experts' weights, and their values in FP8 if both are `RoundedWeights`."""
    if isinstance(w_gate_up, RoundedWeights) and isinstance(w_down, RoundedWeights):
        return Matrices(w_gate_up.like, w_down.like), QuantisedExperts(w_gate_up.rounded, w_down.rounded)
    return Matrices(w_gate_up, w_down), None


def with_copies(weights: tuple[Any, Any], copies: QuantisedExperts | None) -> tuple[Any, Any]:
    """Undoes `weights_and_copies`."""
    if copies is None:
        return weights
    gate_up, down = weights
    return RoundedWeights(copies.gate_up, gate_up), RoundedWeights(copies.down, down)
