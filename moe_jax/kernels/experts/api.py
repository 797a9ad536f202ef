"""The experts of a Mixture-of-Experts layer: public differentiable ops on arrays, with their gradients by hand.

Letters: T tokens, K choices per token, R = T*K rows sorted by expert (`routing.Plan`), E experts, D hidden, I intermediate.

    h[r]   = w_gate_up[e(r)] x[token(r)]                                   [R, 2I], gate first
    act[r] = silu(h[r, :I]) * h[r, I:]                                     [R, I]
    y[t]   = sum_k weights[t, k] * w_down[e] act[row(t, k)]                [T, D]

Backward, with g[r] = w_down[e(r)]^T dy[token(r)] (no weight in it):

    dweights[t, k] = <g, act> at row(t, k)             dact[r] = weights(r) * g[r]
    dw_down[e]     = sum_r outer(dy[token(r)], weights(r) * act[r])
    dh             = dact times the derivative of silu(gate) * up
    dw_gate_up[e]  = sum_r outer(dh[r], x[token(r)])   dx[t]   = sum_k w_gate_up[e]^T dh[row(t, k)]

R grows by what fills up the experts' last blocks of rows where the backend needs aligned rows. Kept for backward: x, h,
weights, plan. act is recomputed, and dweights needs neither the rows of y nor those of x, so nothing of T*K*D elements
outlives the pass that makes it (SonicMoE, https://arxiv.org/abs/2512.14080).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts import separate_vjps as separate_vjps
from moe_jax.kernels.experts.choose_backend import resolve_backend
from moe_jax.kernels.experts.fused_vjp import Options, experts_of_parts
from moe_jax.kernels.experts.routing import Plan, is_an_expert
from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import check_experts_mlp, check_shape
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike, varying_axes


class Part(NamedTuple):
    """Tokens and their choices."""

    x: Float[Array, "tokens hidden"]
    topk_weights: Float[Array, "tokens k"]
    topk_experts: Int[Array, "tokens k"]


def experts_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Int[Array, "tokens k"],
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    max_pairs: int | None = None,
    accumulate_into: tuple[Float[Array, "experts 2*inter hidden"], Float[Array, "experts hidden inter"]] | None = None,
    totals_in_stack: bool = False,
) -> Float[Array, "tokens hidden"]:
    """y[t] = sum_k topk_weights[t, k] * w_down[e] (silu(gate) * up), (gate, up) = w_gate_up[e] x[t], e = topk_experts[t, k].

    Dropless: every token reaches every expert it chose. Computes in x's dtype with f32 sums and a f32 activation; weights
    of another dtype are cast where they are used. Differentiable in x, both weights and topk_weights, each gradient in its
    argument's dtype; weight gradients are summed in f32 and rounded once.

    The gradient is by hand, in reverse mode, and once: `jax.jvp` of this function is a TypeError, and a gradient of its
    gradient a ValueError. On backend "xla" a product with the Hessian goes forward over reverse, `jax.jvp(jax.grad(f), ...)`.

    Args:
        backend: "mosaic" (Hopper GPUs, bf16 and f16), "triton" (NVIDIA GPUs from Ampere on, bf16, f16 and f32) or "xla"
            (everywhere); by default the environment variable MOE_JAX_BACKEND, else the first of them that is written for
            the device and takes the input.
        chunk_tokens: process so many tokens at a time to bound temporary memory (R*D elements become
            chunk_tokens*K*D). Same result; the weight gradients of a chunked call are summed in f32 over the chunks.
        max_pairs: how many of the ids in [0, E) to make room for (of each chunk): R is max_pairs instead of T*K. Those beyond
            count as ids outside, the last experts' first.
        accumulate_into: what earlier micro-batches gave as gradients of (w_gate_up, w_down), in f32 (f64 for f64). y does not
            depend on it. Its own gradient is the new total, accumulate_into + the gradients of this call, unrounded: each
            kernel adds what it computed to what lies there, in the same memory where the caller donates or carries it, and
            what an expert without tokens has there stays as it is. The weights then have no gradient of their own (zero):

                def loss(totals, x, ...):
                    y = experts_mlp(x, w_gate_up, w_down, ..., accumulate_into=totals)
                totals = jax.grad(loss)(totals, x, ...)      # totals + d loss / d (w_gate_up, w_down)

            The gradient of y must reach it by one call alone: two would add it twice. A `vmap` over tokens is several calls,
            and so is `shard_map`, inside which each device has totals of its own, to be summed over devices at the end.

        totals_in_stack: accumulate_into are slices of stacked arrays, and their gradients go back to where these lay by
            `lax.dynamic_update_slice`, as in `layers.stack`: the kernels then work there. Other slices are copied first: XLA
            would let a kernel change the slice itself and take the result from elsewhere.

    Expert ids are not checked, since under jit their values are unknown: a pair whose id is outside [0, E) adds nothing to
    its token and gets no gradient.

    Raises:
        ValueError: shapes that do not fit together, a non-integer topk_experts, chunk_tokens or max_pairs < 1, a backend that
            is unknown or does not take the input, accumulate_into of another dtype or equal on devices that differ in x, or
            arrays split over mesh axes of type Explicit.
    """
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    _check_positive(chunk_tokens=chunk_tokens, max_pairs=max_pairs)
    if chunk_tokens is not None and chunk_tokens >= x.shape[0]:
        chunk_tokens = None
    backend = resolve_backend(backend, x.dtype, x.shape[1], w_down.shape[2])
    arrays = vary_alike((x, w_gate_up, w_down, topk_weights, topk_experts))
    if accumulate_into is not None:
        accumulate_into = _checked_totals(accumulate_into, arrays, sizes)
        # The totals' gradient takes the place of the weights'.
        arrays = (arrays[0], *map(jax.lax.stop_gradient, arrays[1:3]), *arrays[3:])
    x, w_gate_up, w_down, topk_weights, topk_experts = arrays
    topk_weights = _of_experts(topk_weights, topk_experts, w_down.shape[0])
    options = Options(backend, (max_pairs,), chunk_tokens=chunk_tokens, totals_in_stack=totals_in_stack)
    return experts_of_parts((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), accumulate_into, options)[0]


def experts_mlp_of_parts(
    parts: Sequence[Part],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    *,
    backend: str | None = None,
    max_pairs: Sequence[int | None] | None = None,
    shares: Sequence[int] | None = None,
) -> tuple[Float[Array, "tokens hidden"], ...]:
    """`experts_mlp` of several groups of tokens, one after the other, where some arrive later than others.

    A part waits for its own tokens and for the parts before it, and its y is there before the parts behind it are computed; so
    are its gradients. But of the first part, the caller's own tokens, the down pass comes last: something to compute while the
    last outputs of others travel. The weights' gradients come last, each summed over all parts in f32 in one pass and rounded
    once.

    Args:
        max_pairs: as in `experts_mlp`, one for each part.
        shares: of how many devices each part's tokens are, as many of each. So many equal pieces of its y, and of its
            gradient to x, are made one by one: what is sent from here is not copied out of the whole.

    Raises:
        ValueError: parts that differ in more than their numbers of tokens, or none, not one of max_pairs or shares for each,
            shares that do not divide the tokens, and what `experts_mlp` raises.
    """
    refuse_explicit_axes(w_gate_up=w_gate_up, w_down=w_down)
    for part in parts:
        x, topk_weights, topk_experts = part
        check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts)
        refuse_explicit_axes(**part._asdict())
    types = [", ".join(f"{a.dtype}[tokens, {a.shape[1]}]" for a in part) for part in parts]
    if len(set(types)) != 1:
        raise ValueError(f"parts must be one or more of the same dtypes and widths; got {'; '.join(types) or 'none'}")
    max_pairs = [None] * len(parts) if max_pairs is None else max_pairs
    if len(max_pairs) != len(parts):
        raise ValueError(f"max_pairs must be one for each of the {len(parts)} parts; got {len(max_pairs)}")
    shares = [1] * len(parts) if shares is None else shares
    if len(shares) != len(parts) or any(n < 1 or part.x.shape[0] % n for part, n in zip(parts, shares, strict=True)):
        tokens = [part.x.shape[0] for part in parts]
        raise ValueError(f"shares must be one for each part, and divide its tokens; got {list(shares)} for {tokens} tokens")
    for pairs in max_pairs:
        _check_positive(max_pairs=pairs)
    backend = resolve_backend(backend, parts[0].x.dtype, parts[0].x.shape[1], w_down.shape[2])
    parts, w_gate_up, w_down = vary_alike((tuple(map(tuple, parts)), w_gate_up, w_down))
    xs, weights, experts = zip(*parts, strict=True)
    weights = tuple(_of_experts(*of_part, w_down.shape[0]) for of_part in zip(weights, experts, strict=True))
    options = Options(backend, tuple(max_pairs), tuple(shares))
    return experts_of_parts(xs, w_gate_up, w_down, weights, experts, None, options)


def gate_up(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    plan: Plan,
    *,
    backend: str | None = None,
) -> Float[Array, "rows 2*inter"]:
    """h[r] = w_gate_up[e(r)] x[token(r)], rows sorted by expert as `plan` says, in x's dtype; zero in a row of no pair.

    Raises:
        ValueError: shapes that do not fit together, a backend that is unknown or takes neither the input nor the plan's
            row_alignment, a plan that `holds_all_tokens`.
    """
    _refuse_plan_of_few(plan)
    sizes = {"tokens": plan.row_of_pair.shape[0], "experts": plan.num_experts}
    check_shape("x", x, "tokens hidden", sizes)
    check_shape("w_gate_up", w_gate_up, "experts 2*inter hidden", sizes)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up)
    backend = resolve_backend(backend, x.dtype, x.shape[1], w_gate_up.shape[1] // 2, plan.row_alignment)
    return _of_computed_pairs(separate_vjps.gate_up(*vary_alike((x, w_gate_up, plan)), backend), plan)


def down(
    act: Float[Array, "rows inter"],
    w_down: Float[Array, "experts hidden inter"],
    weights: Float[Array, "tokens k"],
    plan: Plan,
    *,
    backend: str | None = None,
) -> Float[Array, "tokens hidden"]:
    """y[t] = sum_k weights[t, k] * w_down[e] act[row(t, k)], summed over k in f32, in act's dtype.

    Rows of no pair may hold anything, and have no gradient.

    Raises:
        ValueError: shapes that do not fit together, a backend that is unknown or takes neither the input nor the plan's
            row_alignment, a plan that `holds_all_tokens`.
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
    return separate_vjps.down(*vary_alike((_of_computed_pairs(act, plan), w_down, weights, plan)), backend)


def _check_positive(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None; got {value}")


def _checked_totals(totals: Sequence[Array], arrays: tuple[Array, ...], sizes: dict[str, int]) -> tuple[Array, Array]:
    if len(totals) != 2 or any(total is None for total in totals):
        found = ["None" if total is None else str(list(total.shape)) for total in totals]
        raise ValueError(f"accumulate_into must be two arrays, of w_gate_up's and of w_down's shape; got {', '.join(found)}")
    wanted = at_least_f32(arrays[0].dtype)
    axes = varying_axes(arrays)
    shapes = "experts 2*inter hidden", "experts hidden inter"
    for i, (total, shape) in enumerate(zip(totals, shapes, strict=True)):
        name = f"accumulate_into[{i}]"
        check_shape(name, total, shape, sizes)
        if total.dtype != wanted:
            raise ValueError(f"{name} must be {wanted.name}, in which gradients are summed; got {total.dtype}")
        if missing := sorted(axes - varying_axes(total)):
            raise ValueError(f"{name} must vary over the mesh axes {missing}, as tokens or weights do: a device adds its own")
    gate_up, down = totals
    return gate_up, down


def _of_experts(
    weights: Float[Array, "tokens k"], topk_experts: Int[Array, "tokens k"], num_experts: int
) -> Float[Array, "tokens k"]:
    """Zero where the choice is nobody: that weight, which may be NaN, is multiplied by zeros."""
    return jnp.where(is_an_expert(topk_experts, num_experts), weights, 0)


def _refuse_plan_of_few(plan: Plan) -> None:
    if plan.holds_all_tokens:
        raise ValueError("the plan is of plan_of_few, for a forward pass inside experts_mlp alone; make it by plan(...)")


def _of_computed_pairs(rows: Float[Array, "rows features"], plan: Plan) -> Float[Array, "rows features"]:
    """With zeros in the other rows, which kernels leave unwritten: a gradient to what is between `gate_up` and `down` sums over
    all rows."""
    row = jnp.arange(plan.num_rows, dtype=jnp.int32)
    is_computed = (plan.pair_of_row < plan.row_of_pair.size) & (row < plan.offsets[-1])
    return jnp.where(is_computed[:, None], rows, 0)
