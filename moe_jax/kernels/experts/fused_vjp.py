"""Both passes of the experts as one function with hand-written gradients.

`api` derives the formulas, and `call` checks the arguments. The steps of a pass have three forms. Products are in the dtype of
the tokens (here) or in FP8 (`fp8.passes`). In both, frozen matrices may have low-rank changes (`changed`).
Tokens are given in parts that are computed in turn, or in one part that is split into chunks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from moe_jax.kernels import backends
from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts.changed import down_changed, gate_up_changed, gradients_changed
from moe_jax.kernels.experts.fp8 import backends as fp8_backends
from moe_jax.kernels.experts.fp8.passes import down_in_fp8, gate_up_in_fp8, gradients_in_fp8, quantise_experts
from moe_jax.kernels.experts.fp8.quantise import QuantisedRows, RoundedTokens
from moe_jax.kernels.experts.routing import (
    Plan,
    int32_ids,
    is_an_expert,
    plan,
    plan_of_few,
    rows_of_pairs,
    sum_of_choices,
    wide_ids,
)
from moe_jax.kernels.experts.separate_vjps import (
    ExpertsOptions,
    GateUp,
    Hidden,
    PartGradients,
    weight_of_row,
)
from moe_jax.kernels.experts.weights import Accumulators, ExpertProducts, ExpertWeights, Matrix
from moe_jax.kernels.experts.xla import OuterPart, of_layer
from moe_jax.kernels.low_rank import LowRank
from moe_jax.kernels.precision import at_least_f32, sum_in_order, widened
from moe_jax.kernels.shapes import vary_as

Arrays = tuple[Array, ...]
"""One array per part."""

_Outcome = tuple[Any, Any]
"""The outcome of a step: the next step waits for the first entry, the result, and not for the second."""


class ExpertsOperands(NamedTuple):
    """All arrays of a call; `xs`, `topk_weights` and `experts` have one entry per group of tokens."""

    xs: tuple[Any, ...]
    """Arrays, or `RoundedTokens` if `ExpertsOptions.fp8` is given and `chunk_tokens` is not."""
    weights: ExpertWeights
    topk_weights: Arrays
    experts: Arrays


class ExpertsResiduals(NamedTuple):
    """The residuals of the backward pass.

    Without chunks, `xs` are the arrays from which rows were gathered. If both passes are in one program, XLA sees that the
    backward pass gathers the same rows.
    """

    xs: tuple[Any, ...]
    """Arrays, or `QuantisedRows` instead of `RoundedTokens`."""
    weights: ExpertWeights
    """The weights as given, without a ticket."""
    topk_weights: Arrays
    hidden: Any
    """`Hidden`: one entry per part, or a single one with a leading axis of chunks."""
    experts: Arrays | None = None
    """The chosen ids, if the weights' gradient is a ticket's."""


def experts_of_parts(operands: ExpertsOperands, options: ExpertsOptions) -> Arrays:
    """Computes y for each group of tokens, with a custom gradient.

    Under a `jax.checkpoint` that saves no residuals, the first forward pass computes only y (`optimize_remat`). It hides names
    from a policy that saves some. The GPU interpreter cannot use it, because its callbacks are effects.
    """
    is_interpreted = options.backend == "mosaic" and backends.is_interpreted()
    saves_all = is_interpreted or operands.weights.keeps_residuals
    return (_saving if saves_all else _compiled)(operands, options)


def _without_gradients(operands: ExpertsOperands, options: ExpertsOptions) -> Arrays:
    """Computes y in a forward pass without a backward pass."""
    if len(operands.xs) == 1 and _has_room_for_all(options.max_pairs[0], operands.experts[0]):
        (x,), (weights,), (experts,) = operands.xs, operands.topk_weights, operands.experts
        rows = _rows_of_few_pairs(operands, options)
        if rows is not None:
            choices = widened(rows).reshape(*experts.shape, -1)
            return (sum_of_choices(choices, weights).astype(x.dtype),)
    return forward_pass(operands, options, for_backward=False)[0]


def _rows_of_few_pairs(operands: ExpertsOperands, options: ExpertsOptions) -> Float[Array, "tokens*k hidden"] | None:
    """Returns the outputs of all pairs, if kernels compute them by pairs."""
    (x,), weights, (experts,) = operands.xs, operands.weights, operands.experts
    backend = options.backend if options.fp8 is None else options.fp8.matmuls
    if backend != "mosaic" or isinstance(x, RoundedTokens) or weights.down.change is not None:
        return None
    gate_up, down, act = weights.gate_up, weights.down, options.activation
    if gate_up.bias is not None:
        return None
    if options.fp8 is None:
        return implementation("mosaic").experts_of_few_pairs(x, gate_up.values, down.values, experts, weights.layer, act)
    if gate_up.in_fp8 is None or down.in_fp8 is None:
        return None
    codes = gate_up.in_fp8.rounded, down.in_fp8.rounded
    layer = weights.layer if codes[1].values.ndim == 4 else None
    return fp8_backends.implementation("mosaic").experts_of_few_pairs(x, *codes, experts, layer, act)


def forward_pass(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool = True
) -> tuple[Arrays, ExpertsResiduals]:
    """Computes y for each group of tokens, and the residuals. h is kept only if `for_backward`."""
    forward = _forward_of_parts if options.chunk_tokens is None else _forward_of_chunks
    given = operands.weights
    xs = tuple(x.rounded if isinstance(x, RoundedTokens) else x for x in operands.xs)
    weights = given if options.fp8 is None else _in_fp8(given)
    operands = operands._replace(xs=xs, weights=weights)
    ys, residuals = forward(operands, options, for_backward)
    is_ticket = isinstance(given.gradient, ExpertProducts)
    # Matrices rounded here are not saved: the backward pass rounds them again.
    kept = replace(given, gradient=None) if is_ticket else given
    hidden = checkpoint_name(residuals.hidden, "experts") if given.keeps_residuals else residuals.hidden
    return ys, residuals._replace(weights=kept, hidden=hidden, experts=operands.experts if is_ticket else None)


def _forward_of_parts(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool
) -> tuple[Arrays, ExpertsResiduals]:
    gate_up = partial(_gate_up_of_part, operands, options, for_backward)

    def both_passes(max_pairs: int | None, shares: int | None, x: Array, weights: Array, experts: Array) -> _Outcome:
        """Returns (y of shares, h, u, v) and (plan, x)."""
        (act, h, u), planned = gate_up(max_pairs, x, experts)
        y, v = _down_of_part(operands, options, act, weights, planned[0], shares)
        return (y, h, u, v), planned

    own, *others = zip(options.max_pairs, options.shares, operands.xs, operands.topk_weights, operands.experts, strict=True)
    max_pairs, shares, x, own_weights, own_experts = own
    steps: list[tuple[Callable[..., _Outcome], tuple]] = [(partial(gate_up, max_pairs), (x, own_experts))]
    for max_pairs, other_shares, x, weights, experts in others:
        steps.append((partial(both_passes, max_pairs, other_shares), (x, weights, experts)))
    # The barriers include h: if `jax.checkpoint` does not recompute y, parts must still run in turn.
    ((act, h, u), own_planned), *outcomes = _one_after_the_other(steps)
    if outcomes:
        # The down pass of the device's own tokens comes last: it is computed while the other devices' outputs travel.
        outcomes[-1], act = _wait_for(outcomes[-1], act)
    y, v = _down_of_part(operands, options, act, own_weights, own_planned[0], shares)
    outcomes = [((y, h, u, v), own_planned), *outcomes]
    ys = tuple(jnp.concatenate(y_of_shares) for (y_of_shares, *_), _ in outcomes)
    hidden = tuple(Hidden(h, planned, u, v) for (_, h, u, v), (planned, _) in outcomes)
    xs = tuple(x for _, (_, x) in outcomes)
    return ys, ExpertsResiduals(xs, operands.weights, operands.topk_weights, hidden)


def _forward_of_chunks(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool
) -> tuple[Arrays, ExpertsResiduals]:
    assert options.chunk_tokens is not None
    (x,), (weights,), (experts,) = operands.xs, operands.topk_weights, operands.experts

    def of_chunk(chunk: Arrays) -> tuple[Array, Hidden]:
        x, weights, experts = chunk
        (act, h, u), (planned, _) = _gate_up_of_part(operands, options, for_backward, options.max_pairs[0], x, experts)
        (y,), v = _down_of_part(operands, options, act, weights, planned)
        return y, Hidden(h, planned, u, v)

    # Padding tokens of the last chunk choose an id outside [0, E).
    chunks: Any = (
        split_tokens(x, options.chunk_tokens, 0),
        split_tokens(weights, options.chunk_tokens, 0),
        split_tokens(wide_ids(experts), options.chunk_tokens, options.num_experts),
    )
    y, hidden = jax.lax.map(of_chunk, chunks)
    residuals = ExpertsResiduals(operands.xs, operands.weights, operands.topk_weights, hidden)
    return (join_tokens(y, x.shape[0]),), residuals


_Gradients = tuple[Arrays, Arrays, Any, Array | None]
"""dxs, dweights, the gradients of `ExpertWeights.trained` or with a ticket the `ExpertProducts`, and the first bias's."""


def _backward(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> tuple[ExpertsOperands]:
    """Returns the gradients as `ExpertsOperands`; None for an operand without a gradient."""
    given, sums = residuals.weights, _accumulators(residuals.weights)
    # Without the barriers XLA would let a kernel change a slice of a larger array in place and read the result from elsewhere.
    is_slice = sums is not None and not sums.in_stack
    keep_whole = jax.lax.optimization_barrier if is_slice else lambda arrays: arrays
    weights = replace(given, gradient=keep_whole(sums))
    if options.fp8 is not None:
        weights = _in_fp8(weights, options.fp8.matmuls, in_both_orders=True)
    backward = _backward_of_parts if options.chunk_tokens is None else _backward_of_chunks
    of_xs, dweights, gradients, of_bias = backward(options, residuals._replace(weights=weights), dys)
    no_gradient: Any = None
    pairs = zip(of_xs, residuals.xs, strict=True)
    dxs = tuple(RoundedTokens(no_gradient, dx) if isinstance(x, QuantisedRows) else dx for dx, x in pairs)
    of_weights = _gradients_at(given, keep_whole(gradients) if sums is not None else gradients)
    if of_bias is not None:
        of_weights = replace(of_weights, gate_up=replace(of_weights.gate_up, bias=of_bias))
    # Products of no rows are zeros that vary over no mesh axis.
    return (vary_as(ExpertsOperands(dxs, of_weights, dweights, no_gradient), residuals.xs),)


def _accumulators(weights: ExpertWeights) -> Accumulators | None:
    return weights.gradient if isinstance(weights.gradient, Accumulators) else None


def _gradients_at(weights: ExpertWeights, gradients: Any) -> ExpertWeights:
    """Returns the gradients in their operands' fields, and None in all others."""
    nothing = Matrix(None)
    if isinstance(gradients, ExpertProducts):
        return replace(weights, gate_up=nothing, down=nothing, layer=None, gradient=gradients)
    if isinstance(weights.gradient, Accumulators):
        after = replace(weights.gradient, gate_up=gradients[0], down=gradients[1])
        return replace(weights, gate_up=nothing, down=nothing, layer=None, gradient=after)
    matrices = [nothing, nothing]
    if weights.down.change is not None:
        matrices = [Matrix(None, change=LowRank(*factors)) for factors in (gradients[:2], gradients[2:])]
    elif gradients:
        matrices = [Matrix(gradient) for gradient in gradients]
    return replace(weights, gate_up=matrices[0], down=matrices[1], layer=None, gradient=None)


def _backward_of_parts(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> _Gradients:
    parts = zip(options.shares, residuals.xs, residuals.topk_weights, residuals.hidden, dys, strict=True)
    of_part = partial(_gradients_of_part, residuals.weights, options)
    outcomes = _one_after_the_other([(partial(of_part, *given), (dy,)) for *given, dy in parts])
    dxs = tuple(jnp.concatenate(found.dx_of_shares) for found, _ in outcomes)
    dweights = tuple(found.dweights for found, _ in outcomes)
    products, bias = [products for _, products in outcomes], _trained_bias(residuals.weights)
    of_bias = None if bias is None else _bias_sums(products).astype(bias.dtype)
    if residuals.experts is not None:
        return dxs, dweights, _ticket(options, residuals, products, dys), of_bias
    return dxs, dweights, _multiplied(options.backend, products, residuals.weights), of_bias


def _ticket(
    options: ExpertsOptions, residuals: ExpertsResiduals, products: list[tuple[OuterPart, ...]], dys: Arrays
) -> ExpertProducts:
    """Returns the operands of the gradients, which are multiplied later. Only for a single part."""
    assert residuals.experts is not None
    ((gate_up, down),), (ids,), num_experts = products, residuals.experts, options.num_experts
    known = jnp.where(is_an_expert(ids, num_experts), int32_ids(ids, num_experts), -1).astype(jnp.float32)
    how = options.row_alignment, options.max_pairs[0]
    return ExpertProducts(gate_up.a, residuals.xs[0], dys[0], down.b, known, *how)


def _backward_of_chunks(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> _Gradients:
    """Sums the weights' gradients over the chunks in at least f32."""
    assert options.chunk_tokens is not None
    of_experts, bias = residuals.weights, _trained_bias(residuals.weights)
    trained = _trained_matrices(of_experts)
    into = _accumulators(of_experts)
    start: Arrays = () if into is None else (into.gate_up, into.down)
    if into is None:
        start = vary_as(tuple(jnp.zeros(w.shape, at_least_f32(w.dtype)) for w in trained), residuals.xs)

    def add_chunk(sums: Arrays, chunk: tuple) -> tuple[Arrays, tuple[Array, Array, Array | None]]:
        gradients, products = _gradients_of_part(of_experts, options, None, *chunk)
        (dx,) = gradients.dx_of_shares
        dtypes = tuple(total.dtype for total in sums)
        of_bias = None if bias is None else _bias_sums([products])
        return products_added(options.backend, [products], dtypes, sums), (dx, gradients.dweights, of_bias)

    (dy,), (x,), (weights,) = dys, residuals.xs, residuals.topk_weights
    dy_chunks, x_chunks, weight_chunks = (split_tokens(a, options.chunk_tokens, 0) for a in (dy, x, weights))
    chunks = x_chunks, weight_chunks, residuals.hidden, dy_chunks
    sums, (dx, dweights, of_biases) = jax.lax.scan(add_chunk, start, chunks)
    dx, dweights = join_tokens(dx, x.shape[0]), join_tokens(dweights, x.shape[0])
    if into is None:
        sums = tuple(total.astype(w.dtype) for total, w in zip(sums, trained, strict=True))
    of_bias = None if bias is None or of_biases is None else sum_in_order(of_biases, axis=0).astype(bias.dtype)
    return (dx,), (dweights,), sums, of_bias


def _gate_up_of_part(
    operands: ExpertsOperands,
    options: ExpertsOptions,
    for_backward: bool,
    max_pairs: int | None,
    x: Float[Array, "tokens hidden"] | QuantisedRows,
    experts: Integer[Array, "tokens k"],
) -> _Outcome:
    """Returns a `GateUp`, and (plan, x)."""
    num_experts, alignment, w = options.num_experts, options.row_alignment, operands.weights.gate_up
    # With an alignment of 1 this holds only for a single token.
    are_few = _has_room_for_all(max_pairs, experts) and experts.shape[0] <= alignment and experts.size
    if are_few and not for_backward and w.change is None:
        planned = plan_of_few(experts, num_experts, alignment)
    else:
        planned = plan(experts, num_experts, alignment, max_pairs)
    planned = replace(planned, layer=operands.weights.layer)
    if w.change is not None:
        assert not isinstance(x, QuantisedRows)
        made = gate_up_changed(options, x, w, planned, for_backward=for_backward)
    elif options.fp8 is not None:
        assert w.in_fp8 is not None
        made = gate_up_in_fp8(x, w.in_fp8, planned, options, for_backward=for_backward)
    else:
        backend = implementation(options.backend)
        rows, source = backend.rows_of_tokens(x, planned, for_gradients=for_backward)
        given: Any = dict(source_of_row=source, keep_h=for_backward, activation=options.activation, bias=w.bias)
        h, act = backend.gated_matmul(rows, w.values, planned, **given)
        made = GateUp(act, h)
    return made, (planned, x)


def _down_of_part(
    operands: ExpertsOperands, options: ExpertsOptions, act: Any, weights: Array, plan: Plan, shares: int | None = None
) -> tuple[list[Array], Array | None]:
    """Returns y, one array per share of the tokens, and v of changed matrices."""
    w = operands.weights.down
    if w.change is not None:
        return down_changed(options, act, w, weights, plan, shares)
    if options.fp8 is not None:
        assert w.in_fp8 is not None
        return down_in_fp8(act, w.in_fp8, weights, plan, options, shares), None
    assert w.values is not None
    backend = implementation(options.backend)
    return backend.token_sums(backend.grouped_matmul(act, w.values, plan), plan, weights, shares), None


def _gradients_of_part(
    experts: ExpertWeights,
    options: ExpertsOptions,
    shares: int | None,
    x: Float[Array, "tokens hidden"] | QuantisedRows,
    weights: Float[Array, "tokens k"],
    hidden: Hidden,
    dy: Float[Array, "tokens hidden"],
) -> _Outcome:
    """Returns the `PartGradients` of one part, which later parts wait for, and their products, which they do not."""
    if options.fp8 is not None and experts.down.change is None:
        found = gradients_in_fp8(options, experts, x, weights, hidden, dy, shares)
    else:
        assert not isinstance(x, QuantisedRows)
        if experts.down.change is not None:
            found = gradients_changed(options, experts, x, weights, hidden, dy, shares)
        else:
            found = _gradients_in_dtype(experts, options, shares, x, weights, hidden, dy)
    products = found.products if _trained_matrices(experts) else ()
    return found._replace(products=()), products


def _gradients_in_dtype(
    experts: ExpertWeights,
    options: ExpertsOptions,
    shares: int | None,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens k"],
    hidden: Hidden,
    dy: Float[Array, "tokens hidden"],
) -> PartGradients:
    plan, w_gate_up, w_down = hidden.plan, experts.gate_up.values, experts.down.values
    backend = implementation(options.backend)
    assert w_gate_up is not None and w_down is not None
    rows, source = backend.rows_of_tokens(dy, plan)
    dh, weighted_act, dweight_of_row = backend.gated_matmul_backward(
        rows, w_down, hidden.h, weight_of_row(weights, plan), plan, source_of_row=source, activation=options.activation
    )
    dweights = rows_of_pairs(dweight_of_row, plan).astype(weights.dtype)
    dx_rows = backend.grouped_matmul(dh, w_gate_up, plan, transpose=True)
    products: tuple[OuterPart, ...] = ()
    if not experts.frozen:
        x_rows, of_x = backend.rows_of_tokens(x, plan)
        products = OuterPart(dh, x_rows, plan, None, of_x), OuterPart(rows, weighted_act, plan, source, None)
    return PartGradients(backend.token_sums(dx_rows, plan, None, shares), dweights, products)


def _in_fp8(weights: ExpertWeights, matmuls: str = "xla", in_both_orders: bool = False) -> ExpertWeights:
    """Returns the weights with FP8 matrices: the given copies, or else the layer's weights, rounded."""
    gate_up, down = weights.gate_up, weights.down
    if gate_up.in_fp8 is not None and down.in_fp8 is not None:
        codes = gate_up.in_fp8, down.in_fp8
    else:
        assert gate_up.values is not None and down.values is not None
        codes = quantise_experts(of_layer(gate_up.values, weights.layer), of_layer(down.values, weights.layer), matmuls)
    if in_both_orders:
        codes = codes[0].in_both_orders(), codes[1].in_both_orders()
    return replace(weights, gate_up=replace(gate_up, in_fp8=codes[0]), down=replace(down, in_fp8=codes[1]))


def _multiplied(backend: str, products: Sequence[tuple[OuterPart, ...]], weights: ExpertWeights) -> Arrays:
    """Returns the gradients of `ExpertWeights.trained`, or the accumulators with them added."""
    into = _accumulators(weights)
    sums = None if into is None else (into.gate_up, into.down)
    dtypes = tuple(w.dtype for w in (_trained_matrices(weights) if sums is None else sums))
    return products_added(backend, products, dtypes, sums)


def products_added(
    backend: str, products: Sequence[tuple[OuterPart, ...]], dtypes: tuple[jnp.dtype, ...], sums: Arrays | None
) -> Arrays:
    """Returns the weight gradients: outer products summed over groups of tokens, plus existing sums if given."""
    into = (None,) * len(dtypes) if sums is None else sums
    return tuple(
        implementation(backend).grouped_outer_of_parts(of_parts, dtype, total)
        for of_parts, dtype, total in zip(list(zip(*products, strict=True)), dtypes, into, strict=True)
    )


def _trained_matrices(weights: ExpertWeights) -> list[Array]:
    """Returns the matrices that have gradients, or the factors of the changes of frozen ones."""
    return jax.tree.leaves([w.change if weights.frozen else w.values for w in (weights.gate_up, weights.down)])


def _trained_bias(weights: ExpertWeights) -> Array | None:
    return None if weights.frozen else weights.gate_up.bias


def _bias_sums(products: Sequence[tuple[OuterPart, ...]]) -> Float[Array, "experts 2*inter"]:
    """Returns the sum of each expert's rows of dh over the parts, in at least f32."""
    of_parts = []
    for dh, _, of_rows, *_ in (of_part[0] for of_part in products):
        ones = jnp.ones((of_rows.num_rows, 1), dh.dtype)
        of_parts.append(implementation("xla").grouped_outer(ones, dh, of_rows, at_least_f32(dh.dtype))[:, 0])
    return sum_in_order(jnp.stack(of_parts), axis=0)


def _has_room_for_all(max_pairs: int | None, experts: Array) -> bool:
    return max_pairs is None or max_pairs >= experts.size


def _one_after_the_other(steps: Iterable[tuple[Callable[..., _Outcome], tuple]]) -> list[_Outcome]:
    """Runs functions with their arguments in order; none starts before the previous result is available.

    Without the barriers the compiler fuses small operations of several steps, and the first result is ready only with the last.
    """
    outcomes: list[_Outcome] = []
    for function, arguments in steps:
        if outcomes:
            outcomes[-1], arguments = _wait_for(outcomes[-1], arguments)
        outcomes.append(function(*arguments))
    return outcomes


def _wait_for(outcome: _Outcome, arguments: Any) -> tuple[_Outcome, Any]:
    """Returns both unchanged; the arguments are available only after the outcome's result."""
    result, arguments = jax.lax.optimization_barrier((outcome[0], arguments))
    return (result, outcome[1]), arguments


def split_tokens(a: Array, size: int, fill: int) -> Array:
    """Reshapes [T, ...] to [chunks, size, ...], padding the last chunk with `fill`."""
    chunks = -(-a.shape[0] // size)
    a = jnp.pad(a, [(0, chunks * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
    return a.reshape(chunks, size, *a.shape[1:])


def join_tokens(a: Array, tokens: int) -> Array:
    """Inverts `split_tokens`."""
    return a.reshape(-1, *a.shape[2:])[:tokens]


def _with_gradients(optimize_remat: bool) -> Callable:
    op = jax.custom_vjp(_without_gradients, nondiff_argnums=(1,))
    op.defvjp(forward_pass, _backward, optimize_remat=optimize_remat)
    return jax.jit(op, static_argnums=1)


_compiled, _saving = _with_gradients(optimize_remat=True), _with_gradients(optimize_remat=False)
