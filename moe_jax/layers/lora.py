"""Adapters: trained low-rank changes beside frozen matrices (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685).

`moe_jax.adapters.add_lora` gives a model its adapters. A model without any has neither of these types.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.kernels.low_rank import LowRank


class Frozen(nnx.Variable):
    """A parameter that is not trained. It is no `nnx.Param`: gradients and optimizer states are of the adapters alone."""


class Adapter(nnx.Module):
    """The change scale * b a of a matrix, or of each expert's.

    Both factors are f32, whatever the matrix's dtype, and are cast to the input's dtype where they are used. They are
    `nnx.LoRAParam`s, which are `nnx.Param`s. The change begins at zero: b is zero, and a uniform in +-1/sqrt(in) as in PEFT.

    Args:
      a_shape: [..., rank, in]; the leading axes are those of the stack, and of experts.
      b_shape: [..., out, rank].
      scale: a factor on the change.
    """

    def __init__(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], *, scale: float, rngs: nnx.Rngs):
        bound = a_shape[-1] ** -0.5
        self.a = nnx.LoRAParam(jax.random.uniform(rngs.params(), a_shape, jnp.float32, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros(b_shape, jnp.float32))
        self.scale = scale

    @property
    def rank(self) -> int:
        """The rank of the change."""
        return self.a.shape[-2]

    @property
    def factors(self) -> LowRank:
        """The factors as matrices, the scale in b."""
        return LowRank(self.a[...], self.scale * self.b[...])

    @property
    def change(self) -> Float[Array, "*experts out in"]:
        """The whole change in f32."""
        a, b = self.factors
        return jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


def freeze(model: nnx.Module) -> None:
    """Turns every `nnx.Param` of the model into a `Frozen`, which shares its array."""
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                setattr(module, name, Frozen(variable.get_value()))


def factors_of(adapter: Adapter | None) -> LowRank | None:
    """Returns the adapter's factors; None without an adapter."""
    return None if adapter is None else adapter.factors


def has_adapters(model: nnx.Module) -> bool:
    """Returns True if a matrix of the model has an adapter."""
    return any(isinstance(module, Adapter) for _, module in nnx.iter_modules(model))
