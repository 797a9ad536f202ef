"""Adapters: trained low-rank changes of frozen matrices (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685).

`moe_jax.adapters.add_lora` adds adapters to a model. A model without any has neither of these types.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer, UInt32

from moe_jax.kernels.low_rank import Dropout, LowRank, LowRankOfRows


class Frozen(nnx.Variable):
    """A parameter that is not trained. It is not an `nnx.Param`: only adapters have gradients and optimizer states."""


class DropoutKey(nnx.Variable):
    """Seeds of an adapter's dropout in one training pass, for each layer of a stack and each token."""


class Adapter(nnx.Module):
    """The LoRA update scale * b a of a matrix, or of each expert's matrix.

    Both factors are f32 for any dtype of the matrix, and are cast to the input's dtype for use. They are `nnx.LoRAParam`s,
    which are `nnx.Param`s. The change starts at zero: b is zero, and a uniform in +-1/sqrt(in) as in PEFT.

    Args:
      a_shape: [..., rank, in]; the leading axes are the stack's, and the experts'.
      b_shape: [..., out, rank].
      scale: a factor on the change.
      dropout: the probability with which an element of a's input is dropped in training. `draw_dropout` sets a pass's keys;
        without them nothing is dropped.
    """

    key: DropoutKey | None = None

    def __init__(
        self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], *, scale: float, dropout: float = 0.0, rngs: nnx.Rngs
    ):
        bound = a_shape[-1] ** -0.5
        self.a = nnx.LoRAParam(jax.random.uniform(rngs.params(), a_shape, jnp.float32, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros(b_shape, jnp.float32))
        self.scale = scale
        self.dropout = dropout

    @property
    def rank(self) -> int:
        """The LoRA rank."""
        return self.a.shape[-2]

    @property
    def factors(self) -> LowRank:
        """The factors as matrices; b includes the scale."""
        return LowRank(self.a[...], self.scale * self.b[...])

    @property
    def dropped(self) -> Dropout | None:
        """The dropout applied to a's input in this pass; None without dropout."""
        return None if self.key is None else Dropout(self.key[...], self.dropout)

    @property
    def change(self) -> Float[Array, "*experts out in"]:
        """The update scale * b a as a full matrix, in f32."""
        a, b = self.factors
        return jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


class AdapterOfRows(nnx.Module):
    """Has the place of an `Adapter`, where each token of a call has one of several updates or none. It is not trained."""

    dropped = None

    def __init__(self, factors: LowRankOfRows):
        self.a, self.b, self.kept = map(Frozen, factors)

    @property
    def factors(self) -> LowRankOfRows:
        """The updates' factors side by side."""
        return LowRankOfRows(self.a[...], self.b[...], self.kept[...])


class TokenRows(nnx.Module):
    """Rows of a vocabulary's table that are trained in place of the table's own rows of these tokens, in f32.

    Args:
      tokens: the tokens' ids, in the order of the rows.
    """

    def __init__(self, tokens: tuple[int, ...], rows: Float[Array, "tokens hidden"]):
        self.tokens = tokens
        self.rows = nnx.Param(rows.astype(jnp.float32))

    def put(self, table: Float[Array, "vocab hidden"]) -> Float[Array, "vocab hidden"]:
        """Returns the table with these rows in place, in the table's dtype."""
        return table.at[jnp.array(self.tokens)].set(self.rows[...].astype(table.dtype))

    def of(self, tokens: Integer[Array, "*batch"], x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """Returns the embedded tokens x, with the rows of these tokens in place."""
        order = np.argsort(self.tokens)
        ids = jnp.array(np.array(self.tokens)[order])
        place = jnp.searchsorted(ids, tokens).clip(max=len(order) - 1)
        own = self.rows[...][jnp.array(order)[place]].astype(x.dtype)
        return jnp.where((ids[place] == tokens)[..., None], own, x)


HEAD_PADDING = 64
"""Columns appended to a head's matrix are padded to a multiple of this number, so that its rows keep their alignment."""


def beside_head(adapter: Adapter, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch wider"]:
    """Appends h a^T to hidden states h, so that their product with `wider_head` includes the head's LoRA update."""
    inner = jnp.einsum("...i,ri->...r", hidden, adapter.factors.a[0].astype(hidden.dtype))
    return jnp.concatenate([hidden, _padded(inner)], axis=-1)


def wider_head(adapter: Adapter, weight: Float[Array, "vocab hidden"]) -> Float[Array, "vocab wider"]:
    """Returns the head's matrix with b appended as extra columns; the matrix itself is not rounded again."""
    return jnp.concatenate([weight, _padded(adapter.factors.b[0].astype(weight.dtype))], axis=-1)


def _padded(columns: Float[Array, "*rows rank"]) -> Float[Array, "*rows padded"]:
    return jnp.pad(columns, [(0, 0)] * (columns.ndim - 1) + [(0, -columns.shape[-1] % HEAD_PADDING)])


def freeze(model: nnx.Module) -> None:
    """Turns every `nnx.Param` of the model into a `Frozen` that shares its array."""
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                setattr(module, name, Frozen(variable.get_value()))


def draw_dropout(model: nnx.Module, seeds: UInt32[Array, "*tokens"]) -> None:
    """Sets the dropout seeds of every adapter of the model, in place, for one training pass, from a seed for each token.

    Each layer of each matrix has its own. The model must be merged for a single call, as for `moe.add_expert_gradients_to`.
    """
    for number, adapter in enumerate(_with_dropout(model)):
        of_layers = jax.random.bits(jax.random.PRNGKey(number), (len(adapter.a[...]), *(1,) * seeds.ndim), "uint32")
        adapter.key = DropoutKey(of_layers ^ seeds)


def has_dropout(model: nnx.Module) -> bool:
    """Returns True if an adapter of the model has dropout."""
    return bool(_with_dropout(model))


def _with_dropout(model: nnx.Module) -> list[Adapter]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, Adapter) and module.dropout]


def has_adapters(model: nnx.Module) -> bool:
    """Returns True if a matrix of the model has an adapter."""
    return any(isinstance(module, Adapter) for _, module in nnx.iter_modules(model))
