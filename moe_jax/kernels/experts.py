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

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels import mosaic_gpu
from moe_jax.kernels.backend import resolve_backend
from moe_jax.kernels.grouped_matmul import OuterPart, grouped_outer_of_parts, implementation, mosaic
from moe_jax.kernels.grouped_matmul.xla import sum_of_choices
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.routing import Plan, is_an_expert, of_pairs, plan, plan_of_few, wide_ids
from moe_jax.kernels.shapes import check_experts_mlp, check_shape
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike, vary_as, varying_axes


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
    options = dict(backend=backend, chunk_tokens=chunk_tokens, max_pairs=(max_pairs,), totals_in_stack=totals_in_stack)
    return _experts_mlp((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), accumulate_into, **options)[0]


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
    options = dict(backend=backend, max_pairs=tuple(max_pairs), shares=tuple(shares))
    return _experts_mlp(xs, w_gate_up, w_down, weights, experts, None, **options)


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
    return _of_computed_pairs(_gate_up(*vary_alike((x, w_gate_up, plan)), backend), plan)


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
    return _down(*vary_alike((_of_computed_pairs(act, plan), w_down, weights, plan)), backend)


def _of_experts(
    weights: Float[Array, "tokens k"], topk_experts: Int[Array, "tokens k"], num_experts: int
) -> Float[Array, "tokens k"]:
    """Zero where the choice is nobody: that weight, which may be NaN, is multiplied by zeros."""
    return jnp.where(is_an_expert(topk_experts, num_experts), weights, 0)


def _of_computed_pairs(rows: Float[Array, "rows features"], plan: Plan) -> Float[Array, "rows features"]:
    """With zeros in the other rows, which kernels leave unwritten: a gradient to what is between `gate_up` and `down` sums over
    all rows."""
    row = jnp.arange(plan.num_rows, dtype=jnp.int32)
    is_computed = (plan.pair_of_row < plan.row_of_pair.size) & (row < plan.offsets[-1])
    return jnp.where(is_computed[:, None], rows, 0)


def _check_positive(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None; got {value}")


def _refuse_plan_of_few(plan: Plan) -> None:
    if plan.holds_all_tokens:
        raise ValueError("the plan is of plan_of_few, for a forward pass inside experts_mlp alone; make it by plan(...)")


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


def _gate_up_forward(x: Array, w_gate_up: Array, plan: Plan, backend: str) -> Array:
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    return implementation(backend).grouped_matmul(rows, w_gate_up, plan, source_of_row=source)


def _gate_up_gradients(
    dh: Array, x: Array, w_gate_up: Array, plan: Plan, backend: str, shares: int | None
) -> tuple[list[Array], OuterPart]:
    """Returns dx of each share of the tokens, and what dw_gate_up is the product of."""
    dx_rows = implementation(backend).grouped_matmul(dh, w_gate_up, plan, transpose=True)
    rows, source = implementation(backend).rows_of_tokens(x, plan)
    return _token_sums(dx_rows, plan, None, backend, shares), OuterPart(dh, rows, plan, None, source)


def _down_forward(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str) -> Array:
    return _down_of_shares(act, w_down, weights, plan, backend, None)[0]


def _down_of_shares(act: Array, w_down: Array, weights: Array, plan: Plan, backend: str, shares: int | None) -> list[Array]:
    return _token_sums(implementation(backend).grouped_matmul(act, w_down, plan), plan, weights, backend, shares)


def _token_sums(rows: Array, plan: Plan, weights: Array | None, backend: str, shares: int | None) -> list[Array]:
    """Of each share of the tokens."""
    sums = implementation(backend).token_sums
    return [sums(rows, plan, weights, share=i, shares=shares) for i in range(shares or 1)]


def _down_gradients(
    dy: Array, act: Array, w_down: Array, weights: Array, plan: Plan, backend: str
) -> tuple[Array, Array, Array]:
    """Returns dact in at least f32, dw_down, dweights."""
    rows, source = implementation(backend).rows_of_tokens(dy, plan)
    g = implementation(backend).grouped_matmul(rows, w_down, plan, source_of_row=source, transpose=True)
    g, wide_act, weight_of_row = widened(g), widened(act), widened(_weight_of_row(weights, plan))[:, None]
    dweights = of_pairs(jnp.sum(g * wide_act, axis=1), plan).astype(weights.dtype)
    weighted_act = (weight_of_row * wide_act).astype(act.dtype)
    dw = grouped_outer_of_parts(backend, [OuterPart(rows, weighted_act, plan, source)], w_down.dtype)
    return weight_of_row * g, dw, dweights


def _experts_mlp(*arrays, backend, max_pairs, shares=(None,), chunk_tokens=None, totals_in_stack=False) -> tuple[Array, ...]:
    """`_experts_mlp_alone` with its gradients. Where a `jax.checkpoint` keeps nothing of a forward pass, that computes y alone.

    JAX has no such thing for the interpreter, whose callbacks are effects.
    """
    is_interpreted = backend == "mosaic" and mosaic_gpu.is_interpreted()
    op = _interpreted_experts_mlp if is_interpreted else _compiled_experts_mlp
    return op(*arrays, backend, chunk_tokens, max_pairs, shares, totals_in_stack)


def _experts_mlp_alone(
    xs: tuple[Array, ...],
    w_gate_up: Array,
    w_down: Array,
    weights: tuple[Array, ...],
    experts: tuple[Array, ...],
    totals: tuple[Array, Array] | None,
    backend: str,
    chunk_tokens: int | None,
    max_pairs: tuple[int | None, ...],
    shares: tuple[int | None, ...],
    totals_in_stack: bool,
) -> tuple[Array, ...]:
    """The y of each part, where no gradient is asked for."""
    if len(xs) == 1 and backend == "mosaic" and _has_room_for_all(max_pairs[0], experts[0]):
        rows = mosaic.experts_of_few_pairs(xs[0], w_gate_up, w_down, experts[0])
        if rows is not None:
            of_pairs = widened(rows).reshape(*experts[0].shape, -1)
            return (sum_of_choices(of_pairs, weights[0]).astype(xs[0].dtype),)
    arrays = xs, w_gate_up, w_down, weights, experts, totals
    return _experts_mlp_forward(*arrays, backend, chunk_tokens, max_pairs, shares, totals_in_stack, for_backward=False)[0]


def _experts_mlp_forward(
    xs: tuple[Array, ...],
    w_gate_up: Array,
    w_down: Array,
    weights: tuple[Array, ...],
    experts: tuple[Array, ...],
    totals: tuple[Array, Array] | None,
    backend: str,
    chunk_tokens: int | None,
    max_pairs: tuple[int | None, ...],
    shares: tuple[int | None, ...],
    totals_in_stack: bool,
    for_backward: bool = True,
) -> tuple[tuple[Array, ...], tuple]:
    """Returns the y of each part and what backward keeps; of a chunked call, h and the plan have a leading axis of chunks.

    Only `for_backward` there is an h, whose rows of no pair are finite: they are multiplied by zeros.
    """

    num_experts, alignment = w_gate_up.shape[0], implementation(backend).ROW_ALIGNMENT

    def act_of(max_pairs: int | None, x: Array, experts: Array) -> tuple[tuple[Array, Array | None], tuple[Plan, Array]]:
        """(act, h), and the plan and x."""
        # With an alignment of 1 that is one token.
        if not for_backward and _has_room_for_all(max_pairs, experts) and x.shape[0] <= alignment and experts.size:
            planned = plan_of_few(experts, num_experts, alignment)
        else:
            planned = plan(experts, num_experts, alignment, max_pairs)
        rows, source = implementation(backend).rows_of_tokens(x, planned, for_gradients=for_backward)
        h, act = implementation(backend).gated_matmul(rows, w_gate_up, planned, source_of_row=source, keep_h=for_backward)
        return (act, h), (planned, x)

    def part(
        max_pairs: int | None, shares: int | None, x: Array, weights: Array, experts: Array
    ) -> tuple[tuple[list[Array], Array | None], tuple[Plan, Array]]:
        """(y of each share, h), and the plan and x."""
        (act, h), (planned, _) = act_of(max_pairs, x, experts)
        return (_down_of_shares(act, w_down, weights, planned, backend, shares), h), (planned, x)

    if chunk_tokens is None:
        own = partial(act_of, max_pairs[0]), (xs[0], experts[0])
        of_others = zip(xs[1:], weights[1:], experts[1:], strict=True)
        others = zip(map(partial, itertools.repeat(part), max_pairs[1:], shares[1:]), of_others, strict=True)
        # h too, for where y is not computed again parts are to come one after the other as well.
        ((act, h), of_own), *outcomes = _one_after_the_other([own, *others])
        if outcomes:
            # While others' outputs travel, there is something left to compute.
            outcomes[-1], act = _behind(outcomes[-1], act)
        y = _down_of_shares(act, w_down, weights[0], of_own[0], backend, shares[0])
        results, used = zip(((y, h), of_own), *outcomes, strict=True)
        of_shares, hs = zip(*results, strict=True)
        ys = tuple(map(jnp.concatenate, of_shares))
        # x as rows were gathered from it: where both passes are one program, XLA sees that backward gathers the same rows.
        plans, xs = zip(*used, strict=True)
        kept = tuple(zip(hs, plans, strict=True))
    else:
        # A chunked call has one part, cut into chunks; the last is filled up with tokens that choose nobody.
        fills = ((xs[0], 0), (weights[0], 0), (wide_ids(experts[0]), num_experts))
        chunks = tuple(_split(a, chunk_tokens, fill) for a, fill in fills)

        def of_chunk(chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array | None], Plan]:
            ((y,), h), (planned, _) = part(max_pairs[0], shares[0], *chunk)
            return (y, h), planned

        (y, h), planned = jax.lax.map(of_chunk, chunks)
        kept = h, planned
        ys = (_join(y, xs[0].shape[0]),)
    return ys, (xs, w_gate_up, w_down, weights, totals, kept)


def _experts_mlp_backward(
    backend: str,
    chunk_tokens: int | None,
    _,
    shares: tuple[int | None, ...],
    totals_in_stack: bool,
    residuals: tuple,
    dys: tuple[Array, ...],
) -> tuple:
    xs, w_gate_up, w_down, weights, totals, kept = residuals
    # Slices stay outside the kernel's call.
    whole = jax.lax.optimization_barrier if totals is not None and not totals_in_stack else lambda arrays: arrays
    totals = whole(totals)

    def part(
        shares: int | None, x: Array, weights: Array, h: Array, plan: Plan, dy: Array
    ) -> tuple[tuple[list[Array], Array], tuple[OuterPart, OuterPart]]:
        """The gradients of each share of x and of weights, and the products that the weights' gradients are."""
        rows, source = implementation(backend).rows_of_tokens(dy, plan)
        dh, weighted_act, dweight_of_row = implementation(backend).gated_matmul_backward(
            rows, w_down, h, _weight_of_row(weights, plan), plan, source_of_row=source
        )
        dx, of_gate_up = _gate_up_gradients(dh, x, w_gate_up, plan, backend, shares)
        of_down = OuterPart(rows, weighted_act, plan, source, None)
        return (dx, of_pairs(dweight_of_row, plan).astype(weights.dtype)), (of_gate_up, of_down)

    def of_matrices(products: Sequence[tuple[OuterPart, OuterPart]], dtypes: tuple, totals: tuple | None) -> tuple[Array, ...]:
        """The weights' gradients, each the sum over parts, `totals` added."""
        arguments = zip(zip(*products, strict=True), dtypes, (None, None) if totals is None else totals, strict=True)
        return tuple(grouped_outer_of_parts(backend, parts, dtype, total) for parts, dtype, total in arguments)

    dtypes = tuple(a.dtype for a in ((w_gate_up, w_down) if totals is None else totals))
    if chunk_tokens is None:
        parts = zip(shares, xs, weights, *zip(*kept, strict=True), strict=True)
        calls = [(partial(part, *of_part), (dy,)) for of_part, dy in zip(parts, dys, strict=True)]
        gradients, products = zip(*_one_after_the_other(calls), strict=True)
        dw = of_matrices(products, dtypes, totals)
        of_shares, dweights = zip(*gradients, strict=True)
        dxs = tuple(map(jnp.concatenate, of_shares))
    else:
        wide = tuple(at_least_f32(dtype) for dtype in dtypes)
        start = totals
        if totals is None:
            start = vary_as((jnp.zeros(w_gate_up.shape, wide[0]), jnp.zeros(w_down.shape, wide[1])), xs)

        def add_chunk(sums: tuple[Array, ...], chunk: tuple) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
            dy, x, weights, h, planned = chunk
            ((dx,), dweights), products = part(shares[0], x, weights, h, planned, dy)
            return of_matrices([products], wide, sums), (dx, dweights)

        chunks = tuple(_split(a, chunk_tokens, 0) for (a,) in (dys, xs, weights))
        dw, of_tokens = jax.lax.scan(add_chunk, start, (*chunks, *kept))
        dw = tuple(total.astype(dtype) for total, dtype in zip(dw, dtypes, strict=True))
        dxs, dweights = ((_join(a, xs[0].shape[0]),) for a in of_tokens)
    of_weights, of_totals = (dw, None) if totals is None else ((None, None), whole(dw))
    return dxs, *of_weights, dweights, None, of_totals


def _has_room_for_all(max_pairs: int | None, experts: Array) -> bool:
    return max_pairs is None or max_pairs >= experts.size


def _one_after_the_other(calls: Iterable[tuple[Callable, tuple]]) -> list[tuple]:
    """(result, other) = f(*arguments) of each; none begins before the result of the one before it is there.

    The compiler would fuse small operations of several calls otherwise, and the first result would be there with the last.
    """
    outcomes: list[tuple] = []
    for f, arguments in calls:
        if outcomes:
            outcomes[-1], arguments = _behind(outcomes[-1], arguments)
        outcomes.append(f(*arguments))
    return outcomes


def _behind(outcome: tuple, arguments: Any) -> tuple[tuple, Any]:
    """Both, the arguments when the outcome's result is there."""
    result, other = outcome
    result, arguments = jax.lax.optimization_barrier((result, arguments))
    return (result, other), arguments


def _weight_of_row(weights: Float[Array, "tokens k"], plan: Plan) -> Float[Array, "rows"]:
    """Each row's top-k weight; zero for a row of no pair."""
    return weights.reshape(-1).at[plan.pair_of_row].get(mode="fill", fill_value=0)


def _split(a: Array, size: int, fill: int) -> Array:
    """[T, ...] -> [chunks, size, ...], the last chunk filled up with `fill`."""
    chunks = -(-a.shape[0] // size)
    a = jnp.pad(a, [(0, chunks * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
    return a.reshape(chunks, size, *a.shape[1:])


def _join(a: Array, tokens: int) -> Array:
    return a.reshape(-1, *a.shape[2:])[:tokens]


def _gate_up_vjp(backend: str, residuals: tuple, dh: Array) -> tuple[Array, Array, None]:
    x, w_gate_up, plan = residuals
    (dx,), product = _gate_up_gradients(dh, x, w_gate_up, plan, backend, None)
    return dx, grouped_outer_of_parts(backend, [product], w_gate_up.dtype), None


def _down_vjp(backend: str, residuals: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    act, w_down, weights, plan = residuals
    dact, dw, dweights = _down_gradients(dy, act, w_down, weights, plan, backend)
    return dact.astype(act.dtype), dw, dweights, None


_gate_up_op = jax.custom_vjp(_gate_up_forward, nondiff_argnums=(3,))
_gate_up_op.defvjp(lambda *args: (_gate_up_forward(*args), args[:3]), _gate_up_vjp)
_gate_up = jax.jit(_gate_up_op, static_argnums=3)

_down_op = jax.custom_vjp(_down_forward, nondiff_argnums=(4,))
_down_op.defvjp(lambda *args: (_down_forward(*args), args[:4]), _down_vjp)
_down = jax.jit(_down_op, static_argnums=4)


def _experts_mlp_op(optimize_remat: bool) -> Callable:
    op = jax.custom_vjp(_experts_mlp_alone, nondiff_argnums=(6, 7, 8, 9, 10))
    op.defvjp(_experts_mlp_forward, _experts_mlp_backward, optimize_remat=optimize_remat)
    return jax.jit(op, static_argnums=(6, 7, 8, 9, 10))


_compiled_experts_mlp, _interpreted_experts_mlp = _experts_mlp_op(optimize_remat=True), _experts_mlp_op(optimize_remat=False)
