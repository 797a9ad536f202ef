"""Gated activations of a feed-forward block (SwiGLU, https://arxiv.org/abs/2002.05202), with hand-written gradients.

Plain `jnp` on f32 arrays of any shape, so that XLA code and Mosaic kernels call the same functions. Triton has a twin,
`activate` and `activation_gradients` in `triton/by_rows.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.precision import widened


@dataclass(frozen=True)
class Activation:
    """act = g * sigmoid(alpha * g) * (u + offset), where g = min(gate, limit) and u = clip(up, -limit, limit).

    `SILU` is silu(gate) * up. gpt-oss has `Activation(alpha=1.702, limit=7.0, offset=1.0)`.

    Raises:
        ValueError: alpha or limit is not a positive number, or offset not a finite one.
    """

    alpha: float = 1.0
    limit: float | None = None
    """None: gate and up are not limited."""
    offset: float = 0.0

    def __post_init__(self):
        for name, value in (("alpha", self.alpha), ("limit", 1.0 if self.limit is None else self.limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of an Activation must be a positive number; got {value}")
        if not math.isfinite(self.offset):
            raise ValueError(f"offset of an Activation must be a finite number; got {self.offset}")

    def forward(self, gate: Array, up: Array, *, in_kernel: bool = False) -> Array:
        """Returns act. `in_kernel` uses a faster form, whose automatic derivative would overflow."""
        gate, up = self._limited(gate, up)
        if in_kernel:
            return gate / (1 + jnp.exp(-self._sharpened(gate))) * self._shifted(up)
        swish = jax.nn.silu(gate) if self.alpha == 1 else gate * jax.nn.sigmoid(self._sharpened(gate))
        return swish * self._shifted(up)

    def backward(self, gate: Array, up: Array, dact: Array) -> tuple[Array, Array]:
        """Returns the gradients with respect to gate and up. With s = sigmoid(alpha * g):

        dgate = dact * (u + offset) * s * (1 + alpha * g * (1 - s)), 0 if gate > limit
        dup   = dact * g * s, 0 if |up| > limit
        """
        g, u = self._limited(gate, up)
        sigmoid = jax.nn.sigmoid(self._sharpened(g))
        dgate = dact * self._shifted(u) * sigmoid * (1 + self._sharpened(g) * (1 - sigmoid))
        return self._within_limits(gate, up, dgate, dact * g * sigmoid)

    def vjp(self, gate: Array, up: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
        """Returns act, and a function dact -> (dgate, dup), in the kernels' order of operations."""
        g, u = self._limited(gate, up)
        sigmoid = 1 / (1 + jnp.exp(-self._sharpened(g)))
        swish, factor = g * sigmoid, self._shifted(u)

        def pullback(dact: Array) -> tuple[Array, Array]:
            dgate = dact * factor * (sigmoid + self._sharpened(swish) * (1 - sigmoid))
            return self._within_limits(gate, up, dgate, dact * swish)

        return swish * factor, pullback

    def _limited(self, gate: Array, up: Array) -> tuple[Array, Array]:
        if self.limit is None:
            return gate, up
        return jnp.minimum(gate, self.limit), jnp.maximum(jnp.minimum(up, self.limit), -self.limit)

    def _within_limits(self, gate: Array, up: Array, dgate: Array, dup: Array) -> tuple[Array, Array]:
        if self.limit is None:
            return dgate, dup
        return jnp.where(gate <= self.limit, dgate, 0.0), jnp.where(jnp.abs(up) <= self.limit, dup, 0.0)

    def _sharpened(self, gate: Array) -> Array:
        return gate if self.alpha == 1 else self.alpha * gate

    def _shifted(self, up: Array) -> Array:
        return up if self.offset == 0 else up + self.offset


SILU = Activation()


def activated(h: Float[Array, "rows 2*inter"], activation: Activation = SILU) -> Float[Array, "rows inter"]:
    """Computes act of h = [gate | up], in at least f32, and returns it in h's dtype."""
    return activation.forward(*_halves(h)).astype(h.dtype)


def gradients_of_rows(
    h: Float[Array, "rows 2*inter"], g: Float[Array, "rows inter"], weight: Float[Array, "rows"], activation: Activation = SILU
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns dh and weight * act in h's dtype, and <g, act> in at least f32, where weight * g is the gradient of act."""
    g, act, weight = widened(g), widened(activated(h, activation)), widened(weight)[:, None]
    dact = weight * g
    dh = jnp.concatenate(activation.backward(*_halves(h), dact), axis=1).astype(h.dtype)
    return dh, (weight * act).astype(h.dtype), jnp.sum(g * act, axis=1)


def _halves(h: Array) -> tuple[Array, Array]:
    gate, up = jnp.split(widened(h), 2, axis=1)
    return gate, up
