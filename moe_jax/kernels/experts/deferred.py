"""Deferred weight gradients: the backward pass returns their operands (a ticket), which are multiplied later.

In the letters of `api`, the gradients are

    dw_gate_up[e] = sum_r outer(dh[r], x[token(r)])        dw_down[e] = sum_r outer(dy[token(r)], weights(r) * act[r])

The backward pass has all four arrays, as the gradient of `ExpertWeights.gradient`:

    def loss(ticket, x, ...):
        (y,) = experts([TokenPart(x, ...)], ExpertWeights(gate_up, down, gradient=ticket))
    products = jax.grad(loss)(ticket, x, ...)
    sums = add_expert_products(products, sums)      # sums + d loss / d (w_gate_up, w_down)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.backends import implementation, resolve_backend
from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fused_vjp import products_added
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.experts.weights import ExpertProducts
from moe_jax.kernels.experts.xla import OuterPart


def expert_products_like(
    x: Float[Array, "tokens hidden"],
    num_experts: int,
    num_experts_per_tok: int,
    inter: int,
    *,
    backend: str | None = None,
    precision: Precision | None = None,
    max_pairs: int | None = None,
) -> ExpertProducts:
    """Returns a ticket: arrays with the shapes of the weight gradients' operands, for tokens like x.

    Inside `jax.shard_map` a ticket varies over the axes of x and the weights.

    Args:
        backend, precision, max_pairs: as in the call that gets the ticket.
    """
    hidden = x.shape[1]
    if precision is None:
        alignment = implementation(resolve_backend(backend, x.dtype, hidden, inter)).ROW_ALIGNMENT
    else:
        alignment = resolve_fp8_backend(backend, x.dtype, hidden, inter, precision).row_alignment
    experts = jnp.zeros((len(x), num_experts_per_tok), jnp.int32)
    rows = plan(experts, num_experts, alignment, max_pairs).num_rows
    dh, act = jnp.zeros((rows, 2 * inter), x.dtype), jnp.zeros((rows, inter), x.dtype)
    return ExpertProducts(dh, x, x, act, experts.astype(jnp.float32), alignment, max_pairs)


def add_expert_products(
    products: ExpertProducts,
    sums: tuple[Float[Array, "experts 2*inter hidden"], Float[Array, "experts hidden inter"]],
    *,
    backend: str | None = None,
) -> tuple[Array, ...]:
    """Computes weight gradients from deferred operands and adds them to `sums`, in place and unrounded.

    Args:
        sums: f32 (f64 for f64).
        backend: as in the call that got the ticket.
    """
    num_experts, hidden, inter = sums[1].shape
    backend = resolve_backend(backend, products.x.dtype, hidden, inter)
    planned = plan(products.experts.astype(jnp.int32), num_experts, products.row_alignment, products.max_pairs)
    x, of_x = implementation(backend).rows_of_tokens(products.x, planned)
    dy, of_dy = implementation(backend).rows_of_tokens(products.dy, planned)
    gate_up = OuterPart(products.dh, x, planned, None, of_x)
    down = OuterPart(dy, products.weighted_act, planned, of_dy, None)
    return products_added(backend, [(gate_up, down)], (sums[0].dtype, sums[1].dtype), sums)
