"""RMSNorm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467), computed in f32."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last axis; the mean and the division in f32, the result in x's dtype."""

    def __init__(self, size: int, *, eps: float, stack: tuple[int, ...] = (), param_dtype: DTypeLike = jnp.float32):
        self.weight = nnx.Param(jnp.ones((*stack, size), param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """Normalises the last axis of x."""
        return rms_norm(x, self.weight[...], self.eps)


# x is the only residual: the f32 arrays between x and y are cheaper to recompute than to write and read.
@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def rms_norm(x: Float[Array, "*batch size"], weight: Float[Array, "size"], eps: float) -> Float[Array, "*batch size"]:
    """Computes w * x / sqrt(mean(x^2) + eps) over the last axis, as `RMSNorm`."""
    x32 = x.astype(jnp.float32) if x.dtype != jnp.float64 else x
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)
