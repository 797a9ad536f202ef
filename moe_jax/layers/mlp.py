"""The dense feed-forward block, SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.layers.linear import Linear


class MLP(nnx.Module):
    """down_proj(activation(gate_proj x, up_proj x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = SILU,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, stddev=stddev, stack=stack, param_dtype=param_dtype, rngs=rngs)

        self.activation = activation
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """Applies the block to each token."""
        return self.down_proj(self.act(x))

    def act(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch inter"]:
        """Returns the activation of each token, in x's dtype."""
        return self.activation.forward(self.gate_proj(x), self.up_proj(x))
