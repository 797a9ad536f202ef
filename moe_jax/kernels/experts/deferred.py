"""`experts_mlp` whose weight gradients are multiplied out later: the backward pass returns their operands.

In the letters of `api`, the gradients are

    dw_gate_up[e] = sum_r outer(dh[r], x[token(r)])        dw_down[e] = sum_r outer(dy[token(r)], weights(r) * act[r])

The backward pass has all four arrays. `layers.tickets` calls both functions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.backends import OuterPart, implementation
from moe_jax.kernels.experts.choose_backend import resolve_backend
from moe_jax.kernels.experts.fused_vjp import (
    ExpertsOperands,
    ExpertsOptions,
    ExpertsResiduals,
    Matrices,
    MatrixProducts,
    forward_pass,
    gradients_of_part,
    matrix_gradients,
)
from moe_jax.kernels.experts.internal import without_strangers
from moe_jax.kernels.experts.routing import int32_ids, is_an_expert, plan
from moe_jax.kernels.shapes import check_experts_mlp
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike


class ExpertProducts(NamedTuple):
    """The operands of the weight gradients of `experts_mlp`."""

    dh: Float[Array, "rows 2*inter"]
    x: Float[Array, "tokens hidden"]
    dy: Float[Array, "tokens hidden"]
    weighted_act: Float[Array, "rows inter"]
    experts: Float[Array, "tokens k"]
    """The chosen ids, from which the plan is made again; -1: nobody. In f32, because gradients are floats; exact below 2^24."""


def experts_mlp_deferring(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    ticket: ExpertProducts,
    *,
    backend: str | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp`; the weights have no gradient (zero), and the ticket's gradient is the operands of theirs.

    y does not depend on the ticket, whose values are not read. `add_expert_products` multiplies its gradient out:

        def loss(ticket, x, ...):
            y = experts_mlp_deferring(x, w_gate_up, w_down, ..., ticket)
        products = jax.grad(loss)(ticket, x, ...)
        gradients = add_expert_products(products, sums)      # sums + d loss / d (w_gate_up, w_down)

    The gradient of y must reach the ticket by one call alone: two calls would add operands of two products.

    Args:
        ticket: arrays like `expert_products_like` returns. Inside `jax.shard_map` they vary over the axes of x and the weights.

    Raises:
        ValueError: what `experts_mlp` raises.
    """
    check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    backend = resolve_backend(backend, x.dtype, x.shape[1], w_down.shape[2])
    x, w_gate_up, w_down, topk_weights, topk_experts = vary_alike((x, w_gate_up, w_down, topk_weights, topk_experts))
    topk_weights = without_strangers(topk_weights, topk_experts, w_down.shape[0])
    options = ExpertsOptions(backend, (None,), activation=activation)
    return _deferring(ExpertsOperands((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), None), ticket, options)


def expert_products_like(
    x: Float[Array, "tokens hidden"], num_experts: int, num_experts_per_tok: int, inter: int, *, backend: str | None = None
) -> ExpertProducts:
    """Returns arrays with the shapes and dtypes of the operands for tokens like x, in x's dtype."""
    backend = resolve_backend(backend, x.dtype, x.shape[1], inter)
    experts = jnp.zeros((len(x), num_experts_per_tok), jnp.int32)
    rows = plan(experts, num_experts, implementation(backend).ROW_ALIGNMENT).num_rows
    dh, act = jnp.zeros((rows, 2 * inter), x.dtype), jnp.zeros((rows, inter), x.dtype)
    return ExpertProducts(dh, x, x, act, experts.astype(jnp.float32))


def add_expert_products(products: ExpertProducts, sums: Matrices, *, backend: str | None = None) -> Matrices:
    """Multiplies the operands and adds the weight gradients to `sums`, in the memory and dtype of these, unrounded.

    Args:
        sums: f32 (f64 for f64).
        backend: that of `experts_mlp_deferring`.
    """
    num_experts, hidden, inter = sums.down.shape
    backend = resolve_backend(backend, products.x.dtype, hidden, inter)
    planned = plan(products.experts.astype(jnp.int32), num_experts, implementation(backend).ROW_ALIGNMENT)
    x, of_x = implementation(backend).rows_of_tokens(products.x, planned)
    dy, of_dy = implementation(backend).rows_of_tokens(products.dy, planned)
    pairs = MatrixProducts(
        gate_up=OuterPart(products.dh, x, planned, None, of_x),
        down=OuterPart(dy, products.weighted_act, planned, of_dy, None),
    )
    return matrix_gradients(backend, [pairs], (sums.gate_up.dtype, sums.down.dtype), sums)


class _Residuals(NamedTuple):
    of_experts: ExpertsResiduals
    topk_experts: Integer[Array, "tokens k"]


def _without_gradients(operands: ExpertsOperands, ticket: ExpertProducts, options: ExpertsOptions) -> Array:
    return forward_pass(operands, options, for_backward=False)[0][0]


def _forward(operands: ExpertsOperands, ticket: ExpertProducts, options: ExpertsOptions) -> tuple[Array, _Residuals]:
    (y,), residuals = forward_pass(operands, options)
    return y, _Residuals(residuals, operands.experts[0])


def _backward(options: ExpertsOptions, residuals: _Residuals, dy: Array) -> tuple[ExpertsOperands, ExpertProducts]:
    of_experts, ids = residuals
    (x,), (weights,), (hidden,) = of_experts.xs, of_experts.weights, of_experts.hidden
    gradients, products = gradients_of_part(of_experts, options, None, x, weights, hidden, dy)
    num_experts = of_experts.w_down.shape[0]
    known = jnp.where(is_an_expert(ids, num_experts), int32_ids(ids, num_experts), -1).astype(jnp.float32)
    no_gradient: Any = None
    of_operands = ExpertsOperands(
        tuple(gradients.dx_of_shares), no_gradient, no_gradient, (gradients.dweights,), no_gradient, None
    )
    return of_operands, ExpertProducts(products.gate_up.a, x, dy, products.down.b, known)


_differentiable = jax.custom_vjp(_without_gradients, nondiff_argnums=(2,))
_differentiable.defvjp(_forward, _backward)
_deferring = jax.jit(_differentiable, static_argnums=2)
