"""`gate_up` and `down`, each by itself with its gradients by hand; `experts` has their formulas and checks their arguments."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.experts.backends import OuterPart, grouped_outer_of_parts, implementation
from moe_jax.kernels.experts.routing import Plan, of_pairs
from moe_jax.kernels.precision import widened


@partial(jax.jit, static_argnums=3)
def gate_up(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> Float[Array, "rows 2*inter"]:
    """h in expert order; the backend may leave rows of no pair unwritten."""
    return _differentiable_gate_up(x, w_gate_up, plan, backend)


@partial(jax.jit, static_argnums=4)
def down(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> Float[Array, "tokens hidden"]:
    """y of act, whose rows of no pair are finite."""
    return _differentiable_down(act, w_down, weights, plan, backend)


def gate_up_gradients(
    dh: Array, x: Array, w_gate_up: Array, plan: Plan, backend: str, shares: int | None = None
) -> tuple[list[Array], OuterPart]:
    """Returns dx of each share of the tokens, and what dw_gate_up is the product of."""
    dx_rows = implementation(backend).grouped_matmul(dh, w_gate_up, plan, transpose=True)
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    return _token_sums(dx_rows, plan, None, backend, shares), OuterPart(dh, rows, plan, None, source)


def down_of_shares(
    act: Array, w_down: Array, weights: Array, plan: Plan, backend: str, shares: int | None = None
) -> list[Array]:
    """y of each share of the tokens."""
    return _token_sums(implementation(backend).grouped_matmul(act, w_down, plan), plan, weights, backend, shares)


def weight_of_row(weights: Float[Array, "tokens k"], plan: Plan) -> Float[Array, "rows"]:
    """Each row's top-k weight; zero for a row of no pair."""
    return weights.reshape(-1).at[plan.pair_of_row].get(mode="fill", fill_value=0)


def _gate_up(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> Array:
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    return implementation(backend).grouped_matmul(rows, w_gate_up, plan, source_of_row=source)


def _gate_up_backward(backend: str, residuals: tuple, dh: Array) -> tuple[Array, Array, None]:
    x, w_gate_up, plan = residuals
    (dx,), product = gate_up_gradients(dh, x, w_gate_up, plan, backend)
    return dx, grouped_outer_of_parts(backend, [product], w_gate_up.dtype), None


def _down(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> Array:
    return down_of_shares(act, w_down, weights, plan, backend)[0]


def _down_backward(backend: str, residuals: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    act, w_down, weights, plan = residuals
    rows, source = implementation(backend).rows_of_tokens(dy, plan)
    g = widened(implementation(backend).grouped_matmul(rows, w_down, plan, source_of_row=source, transpose=True))
    wide_act, of_row = widened(act), widened(weight_of_row(weights, plan))[:, None]
    dweights = of_pairs(jnp.sum(g * wide_act, axis=1), plan).astype(weights.dtype)
    product = OuterPart(rows, (of_row * wide_act).astype(act.dtype), plan, source)
    return (of_row * g).astype(act.dtype), grouped_outer_of_parts(backend, [product], w_down.dtype), dweights, None


_differentiable_gate_up = jax.custom_vjp(_gate_up, nondiff_argnums=(3,))
_differentiable_gate_up.defvjp(lambda *args: (_gate_up(*args), args[:3]), _gate_up_backward)

_differentiable_down = jax.custom_vjp(_down, nondiff_argnums=(4,))
_differentiable_down.defvjp(lambda *args: (_down(*args), args[:4]), _down_backward)


def _token_sums(rows: Array, plan: Plan, weights: Array | None, backend: str, shares: int | None) -> list[Array]:
    """Of each share of the tokens."""
    sums = implementation(backend).token_sums
    return [sums(rows, plan, weights, share=i, shares=shares) for i in range(shares or 1)]
