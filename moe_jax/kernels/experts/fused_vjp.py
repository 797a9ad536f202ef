"""Both passes of the experts as one function with its gradients by hand; `experts` has its formulas and checks its arguments.

Tokens come in parts, which are computed one after the other, or are one part that is cut into chunks.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.backends import OuterPart, grouped_outer_of_parts, implementation
from moe_jax.kernels.experts.routing import Plan, of_pairs, plan, plan_of_few, wide_ids
from moe_jax.kernels.experts.separate_vjps import down_of_shares, gate_up_gradients, weight_of_row
from moe_jax.kernels.experts.xla import sum_of_choices
from moe_jax.kernels.hopper import interpreter
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.varying import vary_as

Arrays = tuple[Array, ...]
"""One of each part."""


class Options(NamedTuple):
    """As `experts_mlp_of_parts` and `experts_mlp` describe them, checked; `chunk_tokens` where there is one part."""

    backend: str
    max_pairs: tuple[int | None, ...]
    shares: tuple[int | None, ...] = (None,)
    chunk_tokens: int | None = None
    totals_in_stack: bool = False


def experts_of_parts(
    xs: Arrays,
    w_gate_up: Array,
    w_down: Array,
    weights: Arrays,
    experts: Arrays,
    totals: tuple[Array, Array] | None,
    options: Options,
) -> Arrays:
    """The y of each part. Where a `jax.checkpoint` keeps nothing of a forward pass, that computes y alone.

    JAX has no such thing for the interpreter, whose callbacks are effects.
    """
    is_interpreted = options.backend == "mosaic" and interpreter.is_interpreted()
    op = _interpreted if is_interpreted else _compiled
    return op(xs, w_gate_up, w_down, weights, experts, totals, options)


def _without_gradients(
    xs: Arrays,
    w_gate_up: Array,
    w_down: Array,
    weights: Arrays,
    experts: Arrays,
    totals: tuple[Array, Array] | None,
    options: Options,
) -> Arrays:
    if len(xs) == 1 and options.backend == "mosaic" and _has_room_for_all(options.max_pairs[0], experts[0]):
        rows = mosaic.experts_of_few_pairs(xs[0], w_gate_up, w_down, experts[0])
        if rows is not None:
            of_choices = widened(rows).reshape(*experts[0].shape, -1)
            return (sum_of_choices(of_choices, weights[0]).astype(xs[0].dtype),)
    return _forward(xs, w_gate_up, w_down, weights, experts, totals, options, for_backward=False)[0]


def _forward(
    xs: Arrays,
    w_gate_up: Array,
    w_down: Array,
    weights: Arrays,
    experts: Arrays,
    totals: tuple[Array, Array] | None,
    options: Options,
    for_backward: bool = True,
) -> tuple[Arrays, tuple]:
    """Returns the y of each part and what backward keeps. Only `for_backward` there is an h."""
    act_of = partial(_act_of_part, w_gate_up, options.backend, for_backward)
    kept: Any
    if options.chunk_tokens is None:
        ys, xs, kept = _forward_of_parts(act_of, w_down, xs, weights, experts, options)
    else:
        act_of = partial(act_of, options.max_pairs[0])
        ys, kept = _forward_of_chunks(act_of, w_down, xs[0], weights[0], experts[0], options.backend, options.chunk_tokens)
    return ys, (xs, w_gate_up, w_down, weights, totals, kept)


def _forward_of_parts(
    act_of: Callable, w_down: Array, xs: Arrays, weights: Arrays, experts: Arrays, options: Options
) -> tuple[Arrays, Arrays, tuple[tuple[Array | None, Plan], ...]]:
    """Returns the y of each part, x as rows were gathered from it, and (h, plan): where both passes are one program, XLA sees
    that backward gathers the same rows."""

    def whole(max_pairs: int | None, shares: int | None, x: Array, weights: Array, experts: Array) -> tuple[tuple, tuple]:
        """(y of each share, h), and the plan and x."""
        (act, h), (planned, _) = act_of(max_pairs, x, experts)
        return (down_of_shares(act, w_down, weights, planned, options.backend, shares), h), (planned, x)

    own, *others = zip(options.max_pairs, options.shares, xs, weights, experts, strict=True)
    max_pairs, shares, x, own_weights, own_experts = own
    calls = [(partial(act_of, max_pairs), (x, own_experts)), *((partial(whole, *other[:2]), other[2:]) for other in others)]
    # h too, for where y is not computed again parts are to come one after the other as well.
    ((act, h), of_own), *outcomes = _one_after_the_other(calls)
    if outcomes:
        # While others' outputs travel, there is something left to compute.
        outcomes[-1], act = _behind(outcomes[-1], act)
    y = down_of_shares(act, w_down, own_weights, of_own[0], options.backend, shares)
    results, used = zip(((y, h), of_own), *outcomes, strict=True)
    of_shares, hs = zip(*results, strict=True)
    plans, xs = zip(*used, strict=True)
    return tuple(map(jnp.concatenate, of_shares)), xs, tuple(zip(hs, plans, strict=True))


def _forward_of_chunks(
    act_of: Callable, w_down: Array, x: Array, weights: Array, experts: Array, backend: str, chunk_tokens: int
) -> tuple[Arrays, tuple[Array | None, Plan]]:
    """Returns the y of the one part, and (h, plan) with a leading axis of chunks."""

    def of_chunk(chunk: Arrays) -> tuple[tuple[Array, Array | None], Plan]:
        x, weights, experts = chunk
        (act, h), (planned, _) = act_of(x, experts)
        (y,) = down_of_shares(act, w_down, weights, planned, backend)
        return (y, h), planned

    # The last chunk is filled up with tokens that choose nobody.
    fills = (x, 0), (weights, 0), (wide_ids(experts), w_down.shape[0])
    (y, h), planned = jax.lax.map(of_chunk, tuple(_split(a, chunk_tokens, fill) for a, fill in fills))
    return (_join(y, x.shape[0]),), (h, planned)


def _backward(options: Options, residuals: tuple, dys: Arrays) -> tuple:
    xs, w_gate_up, w_down, weights, totals, kept = residuals
    # Slices stay outside the kernel's call.
    whole = jax.lax.optimization_barrier if totals is not None and not options.totals_in_stack else lambda arrays: arrays
    totals = whole(totals)
    arrays = (w_gate_up, w_down), totals, xs, weights, kept, dys
    if options.chunk_tokens is None:
        dxs, dweights, dw = _backward_of_parts(*arrays, options.backend, options.shares)
    else:
        dxs, dweights, dw = _backward_of_chunks(*arrays, options.backend, options.chunk_tokens)
    of_matrices, of_totals = (dw, None) if totals is None else ((None, None), whole(dw))
    return dxs, *of_matrices, dweights, None, of_totals


def _backward_of_parts(
    matrices: tuple[Array, Array],
    totals: tuple[Array, Array] | None,
    xs: Arrays,
    weights: Arrays,
    kept: tuple[tuple[Array, Plan], ...],
    dys: Arrays,
    backend: str,
    shares: tuple[int | None, ...],
) -> tuple[Arrays, Arrays, Arrays]:
    """Returns dx and dweights of each part, and the matrices' gradients."""
    parts = zip(shares, xs, weights, *zip(*kept, strict=True), strict=True)
    gradients_of = partial(_gradients_of_part, matrices, backend)
    calls = [(partial(gradients_of, *part), (dy,)) for part, dy in zip(parts, dys, strict=True)]
    gradients, products = zip(*_one_after_the_other(calls), strict=True)
    dtypes = tuple(a.dtype for a in (matrices if totals is None else totals))
    dw = _of_matrices(backend, products, dtypes, totals)
    of_shares, dweights = zip(*gradients, strict=True)
    return tuple(map(jnp.concatenate, of_shares)), dweights, dw


def _backward_of_chunks(
    matrices: tuple[Array, Array],
    totals: tuple[Array, Array] | None,
    xs: Arrays,
    weights: Arrays,
    kept: tuple[Array, Plan],
    dys: Arrays,
    backend: str,
    chunk_tokens: int,
) -> tuple[Arrays, Arrays, Arrays]:
    """As `_backward_of_parts`; the matrices' gradients are summed over chunks in at least f32."""
    zeros = tuple(jnp.zeros(w.shape, at_least_f32(w.dtype)) for w in matrices)
    start = vary_as(zeros, xs) if totals is None else totals
    wide = tuple(total.dtype for total in start)

    def add_chunk(sums: Arrays, chunk: tuple) -> tuple[Arrays, tuple[Array, Array]]:
        dy, x, weights, h, planned = chunk
        ((dx,), dweights), products = _gradients_of_part(matrices, backend, None, x, weights, h, planned, dy)
        return _of_matrices(backend, [products], wide, sums), (dx, dweights)

    chunks = tuple(_split(a, chunk_tokens, 0) for (a,) in (dys, xs, weights))
    sums, of_tokens = jax.lax.scan(add_chunk, start, (*chunks, *kept))
    dx, dweights = (_join(a, xs[0].shape[0]) for a in of_tokens)
    dw = sums if totals is not None else tuple(total.astype(w.dtype) for total, w in zip(sums, matrices, strict=True))
    return (dx,), (dweights,), dw


def _act_of_part(
    w_gate_up: Array,
    backend: str,
    for_backward: bool,
    max_pairs: int | None,
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
) -> tuple[tuple[Array, Array | None], tuple[Plan, Array]]:
    """(act, h), whose rows of no pair are finite, since they are multiplied by zeros, and (plan, x)."""
    num_experts, alignment = w_gate_up.shape[0], implementation(backend).ROW_ALIGNMENT
    # With an alignment of 1 that is one token.
    if not for_backward and _has_room_for_all(max_pairs, experts) and x.shape[0] <= alignment and experts.size:
        planned = plan_of_few(experts, num_experts, alignment)
    else:
        planned = plan(experts, num_experts, alignment, max_pairs)
    rows, source = implementation(backend).rows_of_tokens(x, planned, for_gradients=for_backward)
    h, act = implementation(backend).gated_matmul(rows, w_gate_up, planned, source_of_row=source, keep_h=for_backward)
    return (act, h), (planned, x)


def _gradients_of_part(
    matrices: tuple[Array, Array],
    backend: str,
    shares: int | None,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens k"],
    h: Float[Array, "rows 2*inter"],
    plan: Plan,
    dy: Float[Array, "tokens hidden"],
) -> tuple[tuple[list[Array], Array], tuple[OuterPart, OuterPart]]:
    """The gradients of each share of x and of weights, and the products that the matrices' gradients are."""
    w_gate_up, w_down = matrices
    rows, source = implementation(backend).rows_of_tokens(dy, plan)
    dh, weighted_act, dweight_of_row = implementation(backend).gated_matmul_backward(
        rows, w_down, h, weight_of_row(weights, plan), plan, source_of_row=source
    )
    dx, of_gate_up = gate_up_gradients(dh, x, w_gate_up, plan, backend, shares)
    of_down = OuterPart(rows, weighted_act, plan, source, None)
    return (dx, of_pairs(dweight_of_row, plan).astype(weights.dtype)), (of_gate_up, of_down)


def _of_matrices(backend: str, products: Sequence[tuple[OuterPart, OuterPart]], dtypes: tuple, totals: Arrays | None) -> Arrays:
    """The matrices' gradients, each the sum over parts, `totals` added."""
    arguments = zip(zip(*products, strict=True), dtypes, (None, None) if totals is None else totals, strict=True)
    return tuple(grouped_outer_of_parts(backend, parts, dtype, total) for parts, dtype, total in arguments)


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


def _split(a: Array, size: int, fill: int) -> Array:
    """[T, ...] -> [chunks, size, ...], the last chunk filled up with `fill`."""
    chunks = -(-a.shape[0] // size)
    a = jnp.pad(a, [(0, chunks * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
    return a.reshape(chunks, size, *a.shape[1:])


def _join(a: Array, tokens: int) -> Array:
    return a.reshape(-1, *a.shape[2:])[:tokens]


def _with_gradients(optimize_remat: bool) -> Callable:
    op = jax.custom_vjp(_without_gradients, nondiff_argnums=(6,))
    op.defvjp(_forward, _backward, optimize_remat=optimize_remat)
    return jax.jit(op, static_argnums=6)


_compiled, _interpreted = _with_gradients(optimize_remat=True), _with_gradients(optimize_remat=False)
