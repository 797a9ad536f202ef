"""The experts of a Mixture-of-Experts layer: public differentiable ops on arrays, with hand-written gradients.

Letters: T tokens, K choices per token, R = T*K rows sorted by expert (`routing.Plan`), E experts, D hidden, I intermediate.

    h[r]   = w_gate_up[e(r)] x[token(r)]                                   [R, 2I], gate first
    act[r] = activation(h[r, :I], h[r, I:])                                [R, I]
    y[t]   = sum_k weights[t, k] * w_down[e] act[row(t, k)]                [T, D]

Backward, with g[r] = w_down[e(r)]^T dy[token(r)] (no weight in it):

    dweights[t, k] = <g, act> at row(t, k)             dact[r] = weights(r) * g[r]
    dw_down[e]     = sum_r outer(dy[token(r)], weights(r) * act[r])
    dh             = dact times the derivatives of activation(gate, up)
    dw_gate_up[e]  = sum_r outer(dh[r], x[token(r)])   dx[t]   = sum_k w_gate_up[e]^T dh[row(t, k)]

Some backends need aligned rows; R then grows by the padding of each expert's last block. The residuals are x, h, weights and
plan. Backward computes act again, and dweights needs neither rows of y nor rows of x. So no array of T*K*D elements
outlives the pass that makes it (SonicMoE, https://arxiv.org/abs/2512.14080).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from moe_jax.kernels.backends import resolve_backend
from moe_jax.kernels.experts import separate_vjps
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.kernels.shapes import check_shape, refuse_explicit_axes, vary_alike


def experts_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"] | QuantisedMatrices,
    w_down: Float[Array, "experts hidden inter"] | QuantisedMatrices,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    precision: Precision | None = None,
    activation: Activation = SILU,
    biases: tuple[Float[Array, "experts 2*inter"], Float[Array, "experts hidden"]] | None = None,
) -> Float[Array, "tokens hidden"]:
    """Computes the weighted sum of the experts that each token chose.

        y[t] = sum_k topk_weights[t, k] * (w_down[e] activation(gate, up) + b_down[e])
        (gate, up) = w_gate_up[e] x[t] + b_gate_up[e],   e = topk_experts[t, k]

    Dropless: every token reaches every expert it chose. The matmuls are in x's dtype; sums and the activation are in f32 (f64
    for f64). Differentiable in x, both weights and topk_weights; weight gradients are summed in f32 and rounded once.

    The gradient is hand-written, for reverse mode only and once: `jax.jvp` of this function is a TypeError, and a gradient of
    its gradient a ValueError. Backend "xla" supports Hessian products by forward over reverse, `jax.jvp(jax.grad(f), ...)`.

    Args:
        x: the tokens, in any float dtype that the backend supports.
        w_gate_up: both first matrices of each expert, the gate's rows before the up rows. Cast to x's dtype for use.
        w_down: the second matrix of each expert. Cast like w_gate_up.
        topk_weights: the weight of each choice. Not normalised here.
        topk_experts: the chosen ids, any integer dtype. Ids are not checked, since under jit their values are unknown. An id
            outside [0, E) adds nothing to its token and gets no gradient; a token may choose an expert twice.
        backend: "mosaic" (Hopper GPUs, bf16 and f16), "triton" (NVIDIA GPUs from Ampere on, bf16, f16 and f32) or "xla"
            (everywhere). Default: the environment variable MOE_JAX_BACKEND, else the first of the three that was written for
            the device and supports the input.
        chunk_tokens: the number of tokens to process at a time. Bounds temporary memory: R*D elements become
            chunk_tokens*K*D. Same result; the weight gradients are summed in f32 over the chunks.
        precision: `Precision()` multiplies in FP8, forward and for the gradients of x; the weights' gradients stay in x's
            dtype, bf16. Both matrices may then be `QuantisedMatrices`, which get no gradient. None: products in x's dtype.
        activation: silu(gate) * up, or the limited one of gpt-oss, `Activation(alpha=1.702, limit=7.0, offset=1.0)`.
        biases: b_gate_up and b_down, which get gradients; not with `precision`. Sums and products with them are in f32.

    Returns:
        y in x's dtype. Each gradient has the dtype of its argument.

    Raises:
        ValueError: shapes do not match; topk_experts is not an integer array; or chunk_tokens < 1. Also if the backend is
            unknown or does not support the input, or arrays are split over mesh axes of type Explicit. With `precision`, an x
            that is not bf16, sizes that are not multiples of 128, or quantised matrices that are differentiated. Without,
            quantised matrices. A `precision` of another type, or one with `biases`.
    """
    part, weights = TokenPart(x, topk_weights, topk_experts), ExpertWeights.of(w_gate_up, w_down, biases)
    options: Any = dict(chunk_tokens=chunk_tokens, precision=precision, activation=activation)
    (y,) = experts([part], weights, backend=backend, **options)
    return y


def gate_up(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    plan: Plan,
    *,
    backend: str | None = None,
) -> Float[Array, "rows 2*inter"]:
    """Computes the experts' first matmul, h[r] = w_gate_up[e(r)] x[token(r)], with rows sorted by expert as in `plan`.

    h has x's dtype; rows without a pair are zero.

    Raises:
        ValueError: shapes do not fit together, the backend is unknown or takes neither the input nor the plan's row_alignment,
            or the plan `holds_all_tokens`.
    """
    _refuse_plan_of_few(plan)
    sizes = {"tokens": plan.row_of_pair.shape[0], "experts": plan.num_experts}
    check_shape("x", x, "tokens hidden", sizes)
    check_shape("w_gate_up", w_gate_up, "experts 2*inter hidden", sizes)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up)
    backend = resolve_backend(backend, x.dtype, x.shape[1], w_gate_up.shape[1] // 2, plan.row_alignment)
    x, w_gate_up, varying_plan = vary_alike((x, w_gate_up, plan))
    return _zero_rows_without_a_pair(separate_vjps.gate_up(x, w_gate_up, varying_plan, backend), plan)


def down(
    act: Float[Array, "rows inter"],
    w_down: Float[Array, "experts hidden inter"],
    weights: Float[Array, "tokens k"],
    plan: Plan,
    *,
    backend: str | None = None,
) -> Float[Array, "tokens hidden"]:
    """Computes the experts' second matmul and weighted sum: y[t] = sum_k weights[t, k] * w_down[e] act[row(t, k)].

    Rows without a pair may hold any value, and get no gradient.

    Raises:
        ValueError: shapes do not fit together, the backend is unknown or takes neither the input nor the plan's row_alignment,
            or the plan `holds_all_tokens`.
    """
    _refuse_plan_of_few(plan)
    sizes = {
        "rows": plan.num_rows,
        "tokens": plan.row_of_pair.shape[0],
        "k": plan.row_of_pair.shape[1],
        "experts": plan.num_experts,
    }
    check_shape("act", act, "rows inter", sizes)
    check_shape("w_down", w_down, "experts hidden inter", sizes)
    check_shape("weights", weights, "tokens k", sizes)
    refuse_explicit_axes(act=act, w_down=w_down, weights=weights)
    backend = resolve_backend(backend, act.dtype, w_down.shape[1], act.shape[1], plan.row_alignment)
    act = _zero_rows_without_a_pair(act, plan)
    act, w_down, weights, plan = vary_alike((act, w_down, weights, plan))
    return separate_vjps.down(act, w_down, weights, plan, backend)


def _refuse_plan_of_few(plan: Plan) -> None:
    if plan.holds_all_tokens:
        raise ValueError(
            "plan must come from plan(...); this one comes from plan_of_few, for a forward pass inside experts_mlp"
        )


def _zero_rows_without_a_pair(rows: Float[Array, "rows features"], plan: Plan) -> Float[Array, "rows features"]:
    """Zeroes the rows that kernels leave unwritten.

    Gradients of parameters of a user's activation between `gate_up` and `down` sum over all rows.
    """
    row = jnp.arange(plan.num_rows, dtype=jnp.int32)
    is_computed = (plan.pair_of_row < plan.row_of_pair.size) & (row < plan.offsets[-1])
    return jnp.where(is_computed[:, None], rows, 0)
