"""Linear maps, token embeddings and norms with PyTorch's weight layouts: a checkpoint's bytes are the parameters' bytes."""

import math
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Integer

from moe_jax.kernels.low_rank import Dropout, LowRank, LowRankOfRows, low_rank_map
from moe_jax.layers.lora import Adapter, TokenRows


def fp8() -> ModuleType:
    """Imports and returns `layers.fp8` on first use, since importing kernels is slow."""
    return import_module("moe_jax.layers.fp8")


class Fp8Copies(nnx.Variable):
    """FP8 copies of a module's weights, without gradients: two `InFp8` for `Experts`, or `DenseCopies` for a `Linear`."""


class WeightTicket(nnx.Variable):
    """Placeholder argument whose gradient is the pair of operands of a weight gradient, so dW can be computed later."""


class DeferredWeight(nnx.Variable):
    """A weight matrix without a gradient of its own: its gradient goes to a `WeightTicket` or to accumulators."""


class LinearProduct(NamedTuple):
    """The two operands of a weight gradient, dW = dy^T x for y = x W^T."""

    x: Float[Array, "*batch in"]
    dy: Float[Array, "*batch out"]


class TicketedMatrix(NamedTuple):
    """A matrix W [out, in] with its optional ticket (`WeightTicket`), LoRA update and LoRA dropout."""

    weight: Float[Array, "out in"]
    ticket: LinearProduct | None
    change: LowRank | LowRankOfRows | None = None
    dropout: Dropout | None = None
    in_fp8: Any = None
    """`kernels.experts.fp8.dense.DenseCopies`; None: W multiplies in x's dtype."""


class TicketHolder(nnx.Module):
    """A module with stacked weight matrices whose gradients can be deferred; one ticket serves all of them.

    A subclass names its matrices in `matrices` and describes the products in `products_like`. `layers.tickets` assigns tickets.
    """

    matrices: tuple[str, ...] = ("weight",)
    ticket: WeightTicket | None = None

    def products_like(self, x: Float[Array, "*batch hidden"]) -> Any:
        """Returns arrays with the shapes of one layer's deferred gradient operands, for tokens like x."""
        raise NotImplementedError

    @property
    def held_ticket(self) -> Any:
        """The ticket's arrays; None if gradients are not deferred."""
        return None if self.ticket is None else self.ticket.get_value()


class Linear(TicketHolder):
    """y = x W^T + b with W [out, in] and an optional b [out]. A LoRA adapter adds its update to W.

    Args:
      in_features, out_features: sizes of the last axes of x and y.
      use_bias: True adds b.
      stddev: standard deviation of the normal initialisation of W; b starts at zero.
      stack: leading axes of the parameters: (n,) holds n such layers, to be sliced by a scan before the call.
      param_dtype: dtype of the parameters; they are cast to x's dtype for use.
    """

    lora: Adapter | None = None
    in_fp8: bool
    """True: W multiplies in FP8 (`kernels.fp8_matmul`), and its adapter in x's dtype."""
    fp8_copies: Fp8Copies | None = None
    token_rows: TokenRows | None = None
    """Trained rows of a head, which `Decoder.head_weight` puts into W."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.weight: nnx.Variable = normal_parameter((*stack, out_features, in_features), stddev, param_dtype, rngs)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((*stack, out_features), param_dtype))
        self.use_bias = use_bias
        # Set from the start, so that a model with a reverted choice equals one without a choice.
        self.in_fp8 = False

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Applies the map to the last axis of x; the result has x's dtype."""
        y = linear_map(x, self.matrix)
        return y + self.bias[...].astype(x.dtype) if self.use_bias else y

    def of_heads(self, x: Float[Array, "*batch heads head_dim"]) -> Float[Array, "*batch out"]:
        """Applies the map to [..., heads, head_dim] as if flattened. The backward pass reads x itself, not a reshaped copy."""

        # Attention saves its result for its own backward pass, in x's shape. Without the checkpoint a layer would save both.
        @partial(jax.checkpoint, prevent_cse=False)
        def joined(x: Array) -> Array:
            return self(x.reshape(*x.shape[:-2], -1))

        return joined(x)

    @property
    def matrix(self) -> TicketedMatrix:
        """W with everything `linear_map` needs: ticket, LoRA update, dropout, FP8 copies."""
        in_fp8 = fp8().copies_of_matrix(self.weight, self.fp8_copies) if self.in_fp8 else None
        if self.lora is None:
            return TicketedMatrix(self.weight[...], self.held_ticket, in_fp8=in_fp8)
        return TicketedMatrix(self.weight[...], self.held_ticket, self.lora.factors, self.lora.dropped, in_fp8)

    def products_like(self, x: Float[Array, "*batch _"]) -> LinearProduct:
        """Returns arrays with the shapes of the operands of dW, for tokens like x."""
        return linear_product_like(x, self.weight, x.dtype)


def linear_map(
    x: Float[Array, "*batch in"], matrix: TicketedMatrix, out_dtype: DTypeLike | None = None
) -> Float[Array, "*batch out"]:
    """Computes x W^T in x's dtype, including W's LoRA update. The result has `out_dtype`, by default x's.

    Raises:
      ValueError: a matrix with a ticket that multiplies in FP8.
    """
    if matrix.in_fp8 is not None:
        if matrix.ticket is not None:
            raise ValueError("weight tickets hold operands in bf16: use precision 'bf16', or a schedule without tickets")
        y = fp8().fp8_matmul(x, matrix.weight, matrix.in_fp8)
    elif matrix.ticket is not None:
        return _with_ticket(x, matrix.weight, matrix.ticket, out_dtype)
    else:
        y = _linear_map(x, matrix.weight, out_dtype)
    return y if matrix.change is None else y + low_rank_map(x, matrix.change, out_dtype, matrix.dropout)


def linear_product_like(x: Float[Array, "*batch _"], matrix: nnx.Variable, out_dtype: DTypeLike) -> LinearProduct:
    """Returns arrays with the shapes of the operands of a (stacked) matrix's gradient, for tokens like x."""
    *_, num_out, num_in = matrix.shape
    return LinearProduct(jnp.zeros((*x.shape[:-1], num_in), x.dtype), jnp.zeros((*x.shape[:-1], num_out), out_dtype))


# The residuals are x and the parameter itself: otherwise a layer would save its cast copy.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _linear_map(x: Array, weight: Array, out_dtype: DTypeLike | None) -> Array:
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_ticket(x: Array, weight: Array, ticket: LinearProduct, out_dtype: DTypeLike | None) -> Array:
    return _linear_map(x, weight, out_dtype)


def _with_ticket_forward(x: Array, weight: Array, ticket: LinearProduct, out_dtype: DTypeLike | None):
    return _linear_map(x, weight, out_dtype), (x, weight)


def _with_ticket_backward(out_dtype: DTypeLike | None, residuals: tuple[Array, Array], dy: Array):
    x, weight = residuals
    (dx,) = jax.linear_transpose(lambda x: _linear_map(x, weight, out_dtype), x)(dy)
    return dx, None, LinearProduct(x, dy)


_with_ticket.defvjp(_with_ticket_forward, _with_ticket_backward)


class Embedding(nnx.Module):
    """A table [vocab, hidden]; each token id selects a row.

    An id outside yields NaN, never another token's row. An adapter's factors have a leading axis of 1, and change the table by
    b a. A token's change is its row of b times a.
    """

    lora: Adapter | None = None
    token_rows: TokenRows | None = None

    def __init__(
        self, vocab_size: int, hidden_size: int, *, stddev: float = 0.02, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.weight: nnx.Variable = normal_parameter((vocab_size, hidden_size), stddev, param_dtype, rngs)

    def __call__(self, tokens: Integer[Array, "batch seq"], dtype: DTypeLike) -> Float[Array, "batch seq hidden"]:
        """Returns the tokens' rows as `dtype`."""
        rows = _rows(self.weight[...], tokens).astype(dtype)
        if self.token_rows is not None:
            rows = self.token_rows.of(tokens, rows)
        if self.lora is None:
            return rows
        a, b = (factor[0] for factor in self.lora.factors)
        return rows + _rows(b, tokens).astype(dtype) @ a.astype(dtype)


def _rows(table: Float[Array, "vocab _"], tokens: Integer[Array, "batch seq"]) -> Float[Array, "batch seq _"]:
    # `jnp.take` would count negative ids, such as a label's -100, from the table's end.
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class RMSNorm(nnx.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    The mean and the division are in f32, the result in x's dtype.
    """

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


def normal_parameter(shape: tuple[int, ...], stddev: float, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Param:
    """Initializes a parameter with `draw_normal`, layer by layer, so that no large f32 copy exists."""
    key = rngs.params()
    if math.prod(shape) <= WHOLE_DRAW:
        return nnx.Param(draw_normal(key, shape, stddev, dtype))
    return nnx.Param(_normal_by_parts(key, stddev, shape, dtype))


def draw_normal(key: Array, shape: tuple[int, ...], stddev: Float[ArrayLike, ""], dtype: DTypeLike) -> Float[Array, "..."]:
    """Draws from N(0, stddev^2) in f32 or wider, and rounds to `dtype`.

    JAX's own bf16 normals have 128 values, with a mean of -0.011 standard deviations. With thousands of rows such a mean grows
    from layer to layer, and drives tokens to the same experts.
    """
    return (jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)) * stddev).astype(dtype)


WHOLE_DRAW = 2**22
"""Largest size of a parameter that is drawn at once. A CPU draws larger ones several times faster in parts of PART numbers: the
generator makes a dozen passes over its bits, and a part fits in the cache."""

PART = 2**17
"""Numbers drawn at once for a parameter larger than WHOLE_DRAW."""


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal_by_parts(key: Array, stddev: Float[ArrayLike, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
    rows = math.prod(shape[:-1])
    at_once = next(n for n in range(max(1, PART // shape[-1]), 0, -1) if rows % n == 0)

    def part(key: Array) -> Float[Array, "rows columns"]:
        return draw_normal(key, (at_once, shape[-1]), stddev, dtype)

    return jax.lax.map(part, jax.random.split(key, rows // at_once)).reshape(shape)
