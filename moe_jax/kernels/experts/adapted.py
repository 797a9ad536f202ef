"""`experts_mlp` with frozen matrices and a trained low-rank change of each (LoRA, https://arxiv.org/abs/2106.09685).

In the letters of `api`, with r the rank. Beside w_gate_up are a1 [r, D] and b1 [2I, r], beside w_down a2 [r, I] and b2 [D, r]:

    u[r]   = a1[e(r)] x[token(r)]             h[r] = w_gate_up[e] x[token(r)] + b1[e] u[r]
    v[r]   = a2[e] act[r]                     y[t] = sum_k weights[t, k] * (w_down[e] act + b2[e] v) at row(t, k)

Backward, with dy'[r] = dy[token(r)]; dweights, dact and dh follow from g and h as in `api`:

    t2[r]  = b2[e]^T dy'                      g[r] = w_down[e]^T dy' + a2[e]^T t2
    da2[e] = sum_r outer(t2, weights(r) * act)           db2[e] = sum_r outer(dy', weights(r) * v)
    t1[r]  = b1[e]^T dh                       dx[t] = sum_k (w_gate_up[e]^T dh + a1[e]^T t1) at row(t, k)
    da1[e] = sum_r outer(t1, x[token(r)])                db1[e] = sum_r outer(dh, u)

w_gate_up and w_down get no gradient, and no product is made for one. `changed_matmuls` forms the sums of two products. The
residuals are x, h, u, v, weights and plan. With `precision` the products of w_gate_up and w_down are in FP8, all others not.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.backends import implementation
from moe_jax.kernels.experts.changed_matmuls import (
    ChangedOptions,
    changed_gated_matmul,
    changed_gated_matmul_backward,
    changed_matmul,
    factors_plan,
)
from moe_jax.kernels.experts.choose_backend import resolve_backend
from moe_jax.kernels.experts.fp8.kept import KeptRows, keep_h, read_h
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fused_vjp import join_tokens, split_tokens
from moe_jax.kernels.experts.internal import check_positive, without_strangers
from moe_jax.kernels.experts.routing import Plan, plan, rows_of_pairs, wide_ids
from moe_jax.kernels.experts.separate_vjps import weight_of_row
from moe_jax.kernels.low_rank import LowRank, RowsChange
from moe_jax.kernels.shapes import check_experts_mlp, check_shape
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike


class ExpertsAdapter(NamedTuple):
    """The changes of both matrices. A factor with one expert is shared by all."""

    gate_up: LowRank
    down: LowRank


def experts_mlp_adapted(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    adapter: ExpertsAdapter,
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp` with w_gate_up + b1 a1 and w_down + b2 a2 in place of the matrices.

    Differentiable in x, topk_weights and the factors; the matrices are frozen, and their gradient is zero. Each gradient of a
    factor is summed in f32 and has the factor's dtype.

    Args:
        adapter: `gate_up` has a [E, r, hidden] and b [E, 2*inter, r]; `down` has a [E, r, inter] and b [E, hidden, r]. A first
            axis of length 1 in place of E is one factor for all experts. The two ranks may differ.
        backend, chunk_tokens: as in `experts_mlp`.

    Raises:
        ValueError: what `experts_mlp` raises, or factors that do not fit the matrices.
    """
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    backend = resolve_backend(backend, x.dtype, x.shape[1], sizes["inter"])
    options = ChangedOptions(backend, activation=activation)
    frozen = FrozenMatrices(w_gate_up, w_down)
    return adapted_experts(AdaptedOperands(x, frozen, topk_weights, adapter), topk_experts, sizes, options, chunk_tokens)


def experts_mlp_adapted_in_stack(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "layers experts 2*inter hidden"],
    w_down: Float[Array, "layers experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    adapter: ExpertsAdapter,
    layer: Int[Array, ""],
    *,
    backend: str | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp_adapted` with the experts of one layer of a stack, which kernels read in place.

    The factors are of this layer alone. There are no gradients.

    Raises:
        ValueError: as `experts_mlp_adapted`, or the call is differentiated.
    """
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, experts="layers experts")
    backend = resolve_backend(backend, x.dtype, x.shape[1], sizes["inter"])
    options = ChangedOptions(backend, activation=activation)
    operands = AdaptedOperands(x, FrozenMatrices(w_gate_up, w_down), topk_weights, adapter, layer)
    return adapted_experts(operands, topk_experts, sizes, options, None)


class FrozenMatrices(NamedTuple):
    """The matrices that are changed: arrays, or codes with scales."""

    gate_up: Float[Array, "*layers experts 2*inter hidden"] | QuantisedMatrices
    down: Float[Array, "*layers experts hidden inter"] | QuantisedMatrices


class AdaptedOperands(NamedTuple):
    """The arrays of a call."""

    x: Float[Array, "tokens hidden"]
    frozen: FrozenMatrices
    weights: Float[Array, "tokens k"]
    adapter: ExpertsAdapter
    layer: Int[Array, ""] | None = None
    """`Plan.layer` of the matrices."""


def adapted_experts(
    operands: AdaptedOperands,
    topk_experts: Integer[Array, "tokens k"],
    sizes: dict[str, int],
    options: ChangedOptions,
    chunk_tokens: int | None,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp_adapted` of arguments whose sizes were checked, but for the adapter's.

    Raises:
        ValueError: factors that do not fit the matrices, or chunk_tokens < 1.
    """
    _check_adapter(operands.adapter, sizes)
    check_positive("chunk_tokens", chunk_tokens)
    alignment = _rank_alignment(options.backend, sizes["hidden"], sizes["inter"])
    whole = ExpertsAdapter(*(_of_each_expert(factors, sizes["experts"], alignment) for factors in operands.adapter))
    (x, frozen, weights, whole, layer), topk_experts = vary_alike((operands._replace(adapter=whole), topk_experts))
    weights = without_strangers(weights, topk_experts, sizes["experts"])

    def of_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        x, weights, experts = chunk
        planned = plan(experts, sizes["experts"], options.row_alignment)
        return _adapted(AdaptedOperands(x, frozen, weights, whole), dataclasses.replace(planned, layer=layer), options)

    if chunk_tokens is None or chunk_tokens >= len(x):
        return of_chunk((x, weights, topk_experts))
    # Padding tokens of the last chunk choose an id outside [0, E).
    fills = (x, 0), (weights, 0), (wide_ids(topk_experts), sizes["experts"])
    chunks = tuple(split_tokens(array, chunk_tokens, fill) for array, fill in fills)
    return join_tokens(jax.lax.map(of_chunk, chunks), len(x))


def _check_adapter(adapter: ExpertsAdapter, sizes: dict[str, int]) -> None:
    for name, factors, (num_out, num_in) in (
        ("gate_up", adapter.gate_up, ("2*inter", "hidden")),
        ("down", adapter.down, ("hidden", "inter")),
    ):
        own = dict(sizes)
        for factor, array, axes in (("a", factors.a, f"rank {num_in}"), ("b", factors.b, f"{num_out} rank")):
            experts = "1" if array.shape[:1] == (1,) else "experts"
            check_shape(f"adapter.{name}.{factor}", array, f"{experts} {axes}", own | {"1": 1})
            own["rank"] = factors.a.shape[1]


def _rank_alignment(backend: str, hidden: int, inter: int) -> int:
    """Returns the multiple of a rank that the backend's matmuls take.

    Zeros fill up other ranks. Thin products wait for memory and not for math, so that these cost little.
    """
    if backend == "mosaic":
        # `grouped_outer` has no tile for a gradient of 64 rows or columns whose other side is an odd multiple of 64.
        return 64 if hidden % 128 == inter % 128 == 0 else 128
    return 16 if backend == "triton" else 1


def _of_each_expert(factors: LowRank, num_experts: int, alignment: int) -> LowRank:
    """Returns factors for each expert, their rank filled up with zeros."""
    fill = -factors.a.shape[1] % alignment
    a, b = (jnp.broadcast_to(factor, (num_experts, *factor.shape[1:])) for factor in factors)
    return LowRank(jnp.pad(a, ((0, 0), (0, fill), (0, 0))), jnp.pad(b, ((0, 0), (0, 0), (0, fill)))) if fill else LowRank(a, b)


class _Residuals(NamedTuple):
    operands: AdaptedOperands
    plan: Plan
    h: Float[Array, "rows 2*inter"] | KeptRows
    u: Float[Array, "rows rank"]
    v: Float[Array, "rows rank"]


def _forward(operands: AdaptedOperands, plan: Plan, options: ChangedOptions) -> tuple[Array, _Residuals]:
    x, frozen, weights, (gate_up, down), _ = operands
    backend = implementation(options.backend)
    matmul = partial(backend.grouped_matmul, plan=factors_plan(plan))
    rows, source = backend.rows_of_tokens(x, plan)
    u = matmul(rows, gate_up.a, source_of_row=source)
    h, act = changed_gated_matmul(options, rows, frozen.gate_up, plan, RowsChange(u, gate_up.b), source_of_row=source)
    v = matmul(act, down.a)
    y_rows = changed_matmul(options, act, frozen.down, plan, RowsChange(v, down.b))
    kept = h if options.fp8 is None else keep_h(h, options.fp8.kept)
    return backend.token_sums(y_rows, plan, weights), _Residuals(operands, plan, kept, u, v)


def _backward(
    options: ChangedOptions, residuals: _Residuals, dy: Float[Array, "tokens hidden"]
) -> tuple[AdaptedOperands, None]:
    (x, frozen, weights, (gate_up, down), _), plan, kept, u, v = residuals
    if plan.layer is not None:
        raise ValueError("experts of a layer in a stack have no gradients: give the layer's own matrices")
    backend = implementation(options.backend)
    matmul, outer = partial(backend.grouped_matmul, plan=plan), partial(backend.grouped_outer, plan=plan)
    h = read_h(kept)
    dy_rows, of_dy = backend.rows_of_tokens(dy, plan)
    t2 = matmul(dy_rows, down.b, source_of_row=of_dy, transpose=True)
    weight = weight_of_row(weights, plan)
    dh, weighted_act, dweight_of_row = changed_gated_matmul_backward(
        options, dy_rows, frozen.down, h, weight, plan, RowsChange(t2, down.a), source_of_row=of_dy
    )
    dweights = rows_of_pairs(dweight_of_row, plan).astype(weights.dtype)
    of_down = LowRank(
        outer(t2, weighted_act, dtype=down.a.dtype),
        outer(dy_rows, (v * weight[:, None]).astype(v.dtype), dtype=down.b.dtype, a_source_of_row=of_dy),
    )

    x_rows, of_x = backend.rows_of_tokens(x, plan)
    t1 = matmul(dh, gate_up.b, transpose=True)
    dx_rows = changed_matmul(options, dh, frozen.gate_up, plan, RowsChange(t1, gate_up.a), transpose=True)
    of_gate_up = LowRank(outer(t1, x_rows, dtype=gate_up.a.dtype, b_source_of_row=of_x), outer(dh, u, dtype=gate_up.b.dtype))
    no_gradient: Any = None
    dx = backend.token_sums(dx_rows, plan)
    return AdaptedOperands(dx, no_gradient, dweights, ExpertsAdapter(of_gate_up, of_down)), None


def _without_gradients(operands: AdaptedOperands, plan: Plan, options: ChangedOptions) -> Float[Array, "tokens hidden"]:
    return _forward(operands, plan, options)[0]


_differentiable = jax.custom_vjp(_without_gradients, nondiff_argnums=(2,))
_differentiable.defvjp(_forward, _backward)
_adapted = jax.jit(_differentiable, static_argnums=2)
