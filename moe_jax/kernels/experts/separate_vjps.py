"""`gate_up` and `down`, separately, with hand-written gradients; `api` derives the formulas and checks the arguments."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.backends import Fp8Options
from moe_jax.kernels.experts.fp8.quantise import KeptRows, QuantisedRows
from moe_jax.kernels.experts.routing import Plan, rows_of_pairs
from moe_jax.kernels.experts.xla import OuterPart
from moe_jax.kernels.precision import widened


@partial(jax.jit, static_argnums=3)
def gate_up(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> Float[Array, "rows 2*inter"]:
    """Computes h in expert order with a custom gradient; rows without a pair may be left unwritten."""
    return _differentiable_gate_up(x, w_gate_up, plan, backend)


@partial(jax.jit, static_argnums=4)
def down(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> Float[Array, "tokens hidden"]:
    """Computes y with a custom gradient; rows of act without a pair must be finite."""
    return _differentiable_down(act, w_down, weights, plan, backend)


class ExpertsOptions(NamedTuple):
    """Validated static options of a call (`call.experts`). `chunk_tokens` requires exactly one group of tokens."""

    backend: str
    """The backend of the sums, and without `fp8` of the matrices."""
    num_experts: int
    max_pairs: tuple[int | None, ...]
    shares: tuple[int | None, ...] = (None,)
    chunk_tokens: int | None = None
    fp8: Fp8Options | None = None
    """The products of the matrices in FP8; None: in the dtype of the tokens."""
    activation: Activation = SILU
    row_alignment: int = 1
    """The row_alignment of plans."""


class GateUp(NamedTuple):
    """Result of the gate-up step. Rows without a pair are finite, since later steps multiply them by zero."""

    act: Float[Array, "rows inter"] | QuantisedRows
    h: Float[Array, "rows 2*inter"] | KeptRows | None
    """The form that the backward pass reads; None without one."""
    u: Float[Array, "rows rank"] | None = None
    """The rows after the first factors of changes (`changed`); None without changes."""


class Hidden(NamedTuple):
    """Residuals of one group of tokens: h, the plan, and LoRA intermediates."""

    h: Any
    """`GateUp.h`; None without a backward pass."""
    plan: Plan
    u: Float[Array, "rows rank"] | None = None
    v: Float[Array, "rows rank"] | None = None
    """Both belong to changed matrices (`changed`)."""


class PartGradients(NamedTuple):
    """Gradients for one group of tokens, and the operands of the weight gradients."""

    dx_of_shares: list[Array]
    dweights: Float[Array, "tokens k"]
    products: tuple[OuterPart, ...]
    """Operands whose grouped outer products are the gradients of w_gate_up and w_down, or of the factors of their changes."""


def weight_of_row(weights: Float[Array, "tokens k"], plan: Plan) -> Float[Array, "rows"]:
    """Returns each row's top-k weight; zero for a row without a pair."""
    return weights.reshape(-1).at[plan.pair_of_row].get(mode="fill", fill_value=0)


def _gate_up(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> Array:
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    return implementation(backend).grouped_matmul(rows, w_gate_up, plan, source_of_row=source)


def _gate_up_forward(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> tuple[Array, tuple]:
    return _gate_up(x, w_gate_up, plan, backend), (x, w_gate_up, plan)


def _gate_up_backward(backend: str, residuals: tuple, dh: Array) -> tuple[Array, Array, None]:
    x, w_gate_up, plan = residuals
    dx_rows = implementation(backend).grouped_matmul(dh, w_gate_up, plan, transpose=True)
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    (dx,) = implementation(backend).token_sums(dx_rows, plan)
    product = OuterPart(dh, rows, plan, None, source)
    return dx, implementation(backend).grouped_outer_of_parts([product], w_gate_up.dtype), None


def _down(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> Array:
    return implementation(backend).token_sums(implementation(backend).grouped_matmul(act, w_down, plan), plan, weights)[0]


def _down_forward(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> tuple[Array, tuple]:
    return _down(act, w_down, weights, plan, backend), (act, w_down, weights, plan)


def _down_backward(backend: str, residuals: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    act, w_down, weights, plan = residuals
    rows, source = implementation(backend).rows_of_tokens(dy, plan)
    g = widened(implementation(backend).grouped_matmul(rows, w_down, plan, source_of_row=source, transpose=True))
    wide_act, of_row = widened(act), widened(weight_of_row(weights, plan))[:, None]
    dweights = rows_of_pairs(jnp.sum(g * wide_act, axis=1), plan).astype(weights.dtype)
    product = OuterPart(rows, (of_row * wide_act).astype(act.dtype), plan, source)
    dw_down = implementation(backend).grouped_outer_of_parts([product], w_down.dtype)
    return (of_row * g).astype(act.dtype), dw_down, dweights, None


_differentiable_gate_up = jax.custom_vjp(_gate_up, nondiff_argnums=(3,))
_differentiable_gate_up.defvjp(_gate_up_forward, _gate_up_backward)

_differentiable_down = jax.custom_vjp(_down, nondiff_argnums=(4,))
_differentiable_down.defvjp(_down_forward, _down_backward)
