"""Both passes of the experts as one function with its gradients by hand.

`api` derives the formulas, and `internal` checks the arguments.
Tokens come in parts that are computed one after the other, or in one part that is cut into chunks.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.backends import OuterPart, grouped_outer_of_parts, implementation
from moe_jax.kernels.experts.fp8 import backends as fp8_backends
from moe_jax.kernels.experts.fp8.kept import KeptRows
from moe_jax.kernels.experts.fp8.passes import (
    Fp8Options,
    QuantisedExperts,
    down_in_fp8,
    gate_up_in_fp8,
    gradients_in_fp8,
    quantise_experts,
)
from moe_jax.kernels.experts.fp8.quantise import QuantisedRows
from moe_jax.kernels.experts.fp8.rounded_tokens import RoundedTokens
from moe_jax.kernels.experts.routing import Plan, of_layer, plan, plan_of_few, rows_of_pairs, wide_ids
from moe_jax.kernels.experts.separate_vjps import down_of_shares, dx_of_shares, gate_up_gradients, weight_of_row
from moe_jax.kernels.experts.xla import grouped_outer, sum_of_choices
from moe_jax.kernels.hopper import target
from moe_jax.kernels.precision import at_least_f32, sum_in_order, widened
from moe_jax.kernels.varying import vary_as

Arrays = tuple[Array, ...]
"""One array per part."""


class Matrices(NamedTuple):
    """One array for each of the experts' two matrices: the weights, their gradients or the accumulators of these."""

    gate_up: Float[Array, "*layers experts 2*inter hidden"]
    down: Float[Array, "*layers experts hidden inter"]


class ExpertsOperands(NamedTuple):
    """The arrays of a call; `xs`, `weights` and `experts` have one entry per part."""

    xs: tuple[Any, ...]
    """Arrays, or `RoundedTokens` where `ExpertsOptions.fp8` is given and `chunk_tokens` is not."""
    w_gate_up: Float[Array, "*layers experts 2*inter hidden"] | None
    w_down: Float[Array, "*layers experts hidden inter"] | None
    """Both are None where `quantised` stands for them, frozen."""
    weights: Arrays
    experts: Arrays
    accumulators: Matrices | None
    layer: Int[Array, ""] | None = None
    """`Plan.layer`."""
    quantised: QuantisedExperts | None = None
    """The matrices in FP8, where `ExpertsOptions.fp8` is given; None: made of the weights in each pass."""
    gate_up_bias: Float[Array, "experts 2*inter"] | None = None
    """Added to h. Neither with `quantised` nor with a layer, nor frozen."""

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        matrices: Any = self.w_down if self.quantised is None else self.quantised.down.values
        return matrices.shape[-3]


class ExpertsOptions(NamedTuple):
    """The static choices of a call, checked; `internal` describes them. `chunk_tokens` needs exactly one part."""

    backend: str
    max_pairs: tuple[int | None, ...]
    shares: tuple[int | None, ...] = (None,)
    chunk_tokens: int | None = None
    accumulators_in_stack: bool = False
    frozen: bool = False
    """The matrices get no gradients, and no products are made for any."""
    fp8: Fp8Options | None = None
    """The products in FP8; None: in the dtype of the tokens."""
    activation: Activation = SILU


class HiddenResiduals(NamedTuple):
    """The gate-up pass's result for the backward pass. h is None where no backward pass follows."""

    h: Float[Array, "rows 2*inter"] | KeptRows | None
    plan: Plan


class ExpertsResiduals(NamedTuple):
    """The residuals of the backward pass.

    Without chunks, `xs` are the arrays from which rows were gathered. Where both passes are one program, XLA sees that backward
    gathers the same rows.
    """

    xs: tuple[Any, ...]
    """Arrays, or `QuantisedRows` in place of `RoundedTokens`."""
    w_gate_up: Any
    w_down: Any
    """Arrays; None beside frozen matrices in FP8."""
    weights: Arrays
    accumulators: Matrices | None
    hidden: Any
    """`HiddenResiduals`: one entry per part, or a single one with a leading axis of chunks."""
    layer: Int[Array, ""] | None = None
    quantised: QuantisedExperts | None = None
    gate_up_bias: Float[Array, "experts 2*inter"] | None = None


def experts_of_parts(operands: ExpertsOperands, options: ExpertsOptions) -> Arrays:
    """Returns the y of each part.

    Under a `jax.checkpoint` that saves no residuals, the first forward pass computes y alone (`optimize_remat`). The GPU
    interpreter cannot use `optimize_remat`, because its callbacks are effects.
    """
    is_interpreted = options.backend == "mosaic" and target.is_interpreted()
    return (_interpreted if is_interpreted else _compiled)(operands, options)


def _without_gradients(operands: ExpertsOperands, options: ExpertsOptions) -> Arrays:
    """Computes y of a forward pass that no backward pass follows."""
    if len(operands.xs) == 1 and _has_room_for_all(options.max_pairs[0], operands.experts[0]):
        (x,), (weights,), (experts,) = operands.xs, operands.weights, operands.experts
        rows = _rows_of_few_pairs(operands, options)
        if rows is not None:
            choices = widened(rows).reshape(*experts.shape, -1)
            return (sum_of_choices(choices, weights).astype(x.dtype),)
    return forward_pass(operands, options, for_backward=False)[0]


def _rows_of_few_pairs(operands: ExpertsOperands, options: ExpertsOptions) -> Float[Array, "tokens*k hidden"] | None:
    """Returns the outputs of all pairs, if kernels compute them by pairs."""
    (x,), (experts,) = operands.xs, operands.experts
    if (options.backend if options.fp8 is None else options.fp8.matmuls) != "mosaic" or isinstance(x, RoundedTokens):
        return None
    if operands.gate_up_bias is not None:
        return None
    if options.fp8 is None:
        assert operands.w_gate_up is not None and operands.w_down is not None
        matrices = operands.w_gate_up, operands.w_down
        return implementation("mosaic").experts_of_few_pairs(x, *matrices, experts, operands.layer, options.activation)
    if operands.quantised is None:
        return None
    gate_up, down, *_ = operands.quantised
    layer = operands.layer if down.values.ndim == 4 else None
    return fp8_backends.implementation("mosaic").experts_of_few_pairs(x, gate_up, down, experts, layer, options.activation)


def forward_pass(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool = True
) -> tuple[Arrays, ExpertsResiduals]:
    """Returns the y of each part and the residuals. Only `for_backward` writes h."""
    forward = _forward_of_parts if options.chunk_tokens is None else _forward_of_chunks
    given = operands
    xs = tuple(x.rounded if isinstance(x, RoundedTokens) else x for x in operands.xs)
    operands = operands._replace(xs=xs)
    if options.fp8 is not None:
        quantised = _quantised_of(operands.quantised, operands.w_gate_up, operands.w_down, operands.layer)
        operands = operands._replace(quantised=quantised)
    ys, residuals = forward(operands, options, for_backward)
    # Matrices that were rounded here are not kept: the backward pass rounds them again.
    return ys, residuals._replace(quantised=given.quantised)


class _GateUp(NamedTuple):
    """The result of the gate-up pass; rows without a pair are finite, since later steps multiply them by zeros."""

    act: Float[Array, "rows inter"] | QuantisedRows
    h: Float[Array, "rows 2*inter"] | KeptRows | None


class _PartOutput(NamedTuple):
    y_of_shares: list[Array]
    h: Float[Array, "rows 2*inter"] | KeptRows | None


class _PlannedTokens(NamedTuple):
    plan: Plan
    x: Float[Array, "tokens hidden"] | QuantisedRows


class _Outcome(NamedTuple):
    """The outcome of a step: the next step waits for `result`, and not for `extra`."""

    result: Any
    extra: Any


class _Step(NamedTuple):
    function: Callable[..., _Outcome]
    arguments: tuple


def _forward_of_parts(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool
) -> tuple[Arrays, ExpertsResiduals]:
    def gate_up(max_pairs: int | None, x: Array, experts: Array) -> _Outcome:
        return _gate_up_of_part(operands, options, for_backward, max_pairs, x, experts)

    def both_passes(max_pairs: int | None, shares: int | None, x: Array, weights: Array, experts: Array) -> _Outcome:
        """Returns a `_PartOutput` and its `_PlannedTokens`."""
        (act, h), planned = gate_up(max_pairs, x, experts)
        y = _down_of_part(operands, options, act, weights, planned.plan, shares)
        return _Outcome(_PartOutput(y, h), planned)

    own, *others = zip(options.max_pairs, options.shares, operands.xs, operands.weights, operands.experts, strict=True)
    max_pairs, shares, x, own_weights, own_experts = own
    steps = [_Step(partial(gate_up, max_pairs), (x, own_experts))]
    for max_pairs, other_shares, x, weights, experts in others:
        steps.append(_Step(partial(both_passes, max_pairs, other_shares), (x, weights, experts)))
    # The barriers hold h too: where `jax.checkpoint` does not compute y again, parts must still run one after the other.
    ((act, h), own_planned), *outcomes = _one_after_the_other(steps)
    if outcomes:
        # The down pass of the device's own tokens comes last: it is computed while the other devices' outputs travel.
        outcomes[-1], act = _wait_for(outcomes[-1], act)
    y = _down_of_part(operands, options, act, own_weights, own_planned.plan, shares)
    outcomes = [_Outcome(_PartOutput(y, h), own_planned), *outcomes]
    ys = tuple(jnp.concatenate(outcome.result.y_of_shares) for outcome in outcomes)
    hidden = tuple(HiddenResiduals(outcome.result.h, outcome.extra.plan) for outcome in outcomes)
    return ys, _residuals(operands, tuple(outcome.extra.x for outcome in outcomes), hidden)


class _Chunk(NamedTuple):
    x: Float[Array, "chunk hidden"]
    weights: Float[Array, "chunk k"]
    experts: Integer[Array, "chunk k"]


def _forward_of_chunks(
    operands: ExpertsOperands, options: ExpertsOptions, for_backward: bool
) -> tuple[Arrays, ExpertsResiduals]:
    assert options.chunk_tokens is not None
    (x,), (weights,), (experts,) = operands.xs, operands.weights, operands.experts

    def of_chunk(chunk: _Chunk) -> tuple[Array, HiddenResiduals]:
        (act, h), planned = _gate_up_of_part(operands, options, for_backward, options.max_pairs[0], chunk.x, chunk.experts)
        (y,) = _down_of_part(operands, options, act, chunk.weights, planned.plan)
        return y, HiddenResiduals(h, planned.plan)

    # Padding tokens of the last chunk choose an id outside [0, E).
    chunks = _Chunk(
        split_tokens(x, options.chunk_tokens, 0),
        split_tokens(weights, options.chunk_tokens, 0),
        split_tokens(wide_ids(experts), options.chunk_tokens, operands.num_experts),
    )
    y, hidden = jax.lax.map(of_chunk, chunks)
    return (join_tokens(y, x.shape[0]),), _residuals(operands, operands.xs, hidden)


def _residuals(operands: ExpertsOperands, xs: tuple[Any, ...], hidden: Any) -> ExpertsResiduals:
    return ExpertsResiduals(
        xs,
        operands.w_gate_up,
        operands.w_down,
        operands.weights,
        operands.accumulators,
        hidden,
        operands.layer,
        gate_up_bias=operands.gate_up_bias,
    )


class _Gradients(NamedTuple):
    dxs: Arrays
    dweights: Arrays
    matrices: Matrices | None
    """None if they are frozen."""
    bias: Float[Array, "experts 2*inter"] | None


def _backward(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> tuple[ExpertsOperands]:
    """Returns the gradients as `ExpertsOperands`; None for an operand without a gradient."""
    # Without the barriers XLA would let a kernel change a slice of a larger array itself and take the result from elsewhere.
    is_slice = residuals.accumulators is not None and not options.accumulators_in_stack
    keep_whole = jax.lax.optimization_barrier if is_slice else lambda arrays: arrays
    residuals = residuals._replace(accumulators=keep_whole(residuals.accumulators))
    if options.fp8 is not None:
        quantised = _quantised_of(residuals.quantised, residuals.w_gate_up, residuals.w_down, residuals.layer)
        residuals = residuals._replace(quantised=quantised.in_both_orders())
    backward = _backward_of_parts if options.chunk_tokens is None else _backward_of_chunks
    gradients = backward(options, residuals, dys)
    no_gradient: Any = None
    dgate_up, ddown = (no_gradient, no_gradient) if gradients.matrices is None else gradients.matrices
    of_accumulators = None
    if residuals.accumulators is not None:
        dgate_up, ddown, of_accumulators = no_gradient, no_gradient, keep_whole(gradients.matrices)
    pairs = zip(gradients.dxs, residuals.xs, strict=True)
    dxs = tuple(RoundedTokens(no_gradient, dx) if isinstance(x, QuantisedRows) else dx for dx, x in pairs)
    given = dxs, dgate_up, ddown, gradients.dweights, no_gradient, of_accumulators
    return (ExpertsOperands(*given, gate_up_bias=gradients.bias),)


def _backward_of_parts(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> _Gradients:
    steps = []
    for shares, x, weights, hidden, dy in zip(
        options.shares, residuals.xs, residuals.weights, residuals.hidden, dys, strict=True
    ):
        of_part = partial(_gradients_of_part, residuals, options, shares, x, weights, hidden)
        steps.append(_Step(of_part, (dy,)))
    outcomes = _one_after_the_other(steps)
    of_parts = [outcome.result for outcome in outcomes]
    into, matrices, bias = residuals.accumulators, None, None
    if not options.frozen:
        dtypes = _dtypes(Matrices(residuals.w_gate_up, residuals.w_down) if into is None else into)
        products = [outcome.extra for outcome in outcomes]
        matrices = matrix_gradients(options.backend, products, dtypes, into)
        if residuals.gate_up_bias is not None:
            bias = _bias_sums(products).astype(residuals.gate_up_bias.dtype)
    dxs = tuple(jnp.concatenate(gradients.dx_of_shares) for gradients in of_parts)
    return _Gradients(dxs, tuple(gradients.dweights for gradients in of_parts), matrices, bias)


class _BackwardChunk(NamedTuple):
    dy: Float[Array, "chunk hidden"]
    x: Float[Array, "chunk hidden"]
    weights: Float[Array, "chunk k"]
    hidden: HiddenResiduals


def _backward_of_chunks(options: ExpertsOptions, residuals: ExpertsResiduals, dys: Arrays) -> _Gradients:
    """Sums the matrices' gradients over the chunks in at least f32."""
    assert options.chunk_tokens is not None
    weights_of_experts = Matrices(residuals.w_gate_up, residuals.w_down)
    start = residuals.accumulators
    of_bias = residuals.gate_up_bias
    if start is None and not options.frozen:
        zeros = Matrices._make(jnp.zeros(w.shape, at_least_f32(w.dtype)) for w in weights_of_experts)
        start = vary_as(zeros, residuals.xs)

    def add_chunk(sums: Matrices | None, chunk: _BackwardChunk) -> tuple[Matrices | None, tuple[Array, Array, Array | None]]:
        gradients, products = _gradients_of_part(
            residuals, options, None, chunk.x, chunk.weights, chunk.hidden, chunk.dy
        )  # fmt: skip
        (dx,) = gradients.dx_of_shares
        if sums is not None:
            sums = matrix_gradients(options.backend, [products], _dtypes(sums), sums)
        return sums, (dx, gradients.dweights, None if of_bias is None else _bias_sums([products]))

    (dy,), (x,), (weights,) = dys, residuals.xs, residuals.weights
    dy_chunks, x_chunks, weight_chunks = (split_tokens(a, options.chunk_tokens, 0) for a in (dy, x, weights))
    chunks = _BackwardChunk(dy_chunks, x_chunks, weight_chunks, residuals.hidden)
    matrices, (dx, dweights, biases) = jax.lax.scan(add_chunk, start, chunks)
    dx, dweights = join_tokens(dx, x.shape[0]), join_tokens(dweights, x.shape[0])
    if residuals.accumulators is None and matrices is not None:
        matrices = Matrices._make(total.astype(w.dtype) for total, w in zip(matrices, weights_of_experts, strict=True))
    bias = None if of_bias is None or biases is None else sum_in_order(biases, axis=0).astype(of_bias.dtype)
    return _Gradients((dx,), (dweights,), matrices, bias)


def _gate_up_of_part(
    operands: ExpertsOperands,
    options: ExpertsOptions,
    for_backward: bool,
    max_pairs: int | None,
    x: Float[Array, "tokens hidden"] | QuantisedRows,
    experts: Integer[Array, "tokens k"],
) -> _Outcome:
    """Returns a `_GateUp` and its `_PlannedTokens`."""
    num_experts, backend = operands.num_experts, implementation(options.backend)
    alignment = backend.ROW_ALIGNMENT if options.fp8 is None else options.fp8.row_alignment
    # With an alignment of 1 this holds for a single token alone.
    if not for_backward and _has_room_for_all(max_pairs, experts) and experts.shape[0] <= alignment and experts.size:
        planned = plan_of_few(experts, num_experts, alignment)
    else:
        planned = plan(experts, num_experts, alignment, max_pairs)
    planned = dataclasses.replace(planned, layer=operands.layer)
    given: Any = dict(for_backward=for_backward, activation=options.activation)
    if options.fp8 is not None:
        assert operands.quantised is not None
        act, h = gate_up_in_fp8(x, operands.quantised, planned, options.fp8, **given)
        return _Outcome(_GateUp(act, h), _PlannedTokens(planned, x))
    rows, source = backend.rows_of_tokens(x, planned, for_gradients=for_backward)
    given = dict(source_of_row=source, keep_h=for_backward, activation=options.activation, bias=operands.gate_up_bias)
    h, act = backend.gated_matmul(rows, operands.w_gate_up, planned, **given)
    return _Outcome(_GateUp(act, h), _PlannedTokens(planned, x))


def _down_of_part(
    operands: ExpertsOperands, options: ExpertsOptions, act: Any, weights: Array, plan: Plan, shares: int | None = None
) -> list[Array]:
    """Returns y, one array per share of the tokens."""
    if options.fp8 is None:
        assert operands.w_down is not None
        return down_of_shares(act, operands.w_down, weights, plan, options.backend, shares)
    assert operands.quantised is not None
    return down_in_fp8(act, operands.quantised, weights, plan, options.fp8, shares)


class _PartGradients(NamedTuple):
    dx_of_shares: list[Array]
    dweights: Float[Array, "tokens k"]


class MatrixProducts(NamedTuple):
    """The operands whose grouped outer products are the matrices' gradients."""

    gate_up: OuterPart
    down: OuterPart


def _gradients_of_part(
    residuals: ExpertsResiduals,
    options: ExpertsOptions,
    shares: int | None,
    x: Float[Array, "tokens hidden"] | QuantisedRows,
    weights: Float[Array, "tokens k"],
    hidden: HiddenResiduals,
    dy: Float[Array, "tokens hidden"],
) -> _Outcome:
    """Returns what `gradients_of_part` returns, of products in either precision."""
    if options.fp8 is None:
        assert not isinstance(x, QuantisedRows)
        return gradients_of_part(residuals, options, shares, x, weights, hidden, dy)
    assert residuals.quantised is not None
    h: Any = hidden.h
    of_fp8 = residuals.quantised, hidden.plan, options.fp8, shares
    found = gradients_in_fp8(x, weights, h, dy, *of_fp8, activation=options.activation)
    products = None if options.frozen else MatrixProducts(found.gate_up, found.down)
    return _Outcome(_PartGradients(found.dx_of_shares, found.dweights), products)


def gradients_of_part(
    residuals: ExpertsResiduals,
    options: ExpertsOptions,
    shares: int | None,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens k"],
    hidden: HiddenResiduals,
    dy: Float[Array, "tokens hidden"],
) -> _Outcome:
    """Returns the `_PartGradients` of one part and its `MatrixProducts`; of `residuals` it uses the matrices alone.

    There are no products (None) if the matrices are frozen.
    """
    plan, backend = hidden.plan, options.backend
    rows, source = implementation(backend).rows_of_tokens(dy, plan)
    dh, weighted_act, dweight_of_row = implementation(backend).gated_matmul_backward(
        rows,
        residuals.w_down,
        hidden.h,
        weight_of_row(weights, plan),
        plan,
        source_of_row=source,
        activation=options.activation,
    )
    dweights = rows_of_pairs(dweight_of_row, plan).astype(weights.dtype)
    if options.frozen:
        return _Outcome(_PartGradients(dx_of_shares(dh, residuals.w_gate_up, plan, backend, shares), dweights), None)
    dx, gate_up = gate_up_gradients(dh, x, residuals.w_gate_up, plan, backend, shares)
    down = OuterPart(rows, weighted_act, plan, source, None)
    return _Outcome(_PartGradients(dx, dweights), MatrixProducts(gate_up, down))


def _quantised_of(
    given: QuantisedExperts | None, w_gate_up: Array | None, w_down: Array | None, layer: Array | None
) -> QuantisedExperts:
    """Returns the matrices in FP8: those given, or else the rounded weights of the layer."""
    if given is not None:
        return given
    assert w_gate_up is not None and w_down is not None
    return quantise_experts(of_layer(w_gate_up, layer), of_layer(w_down, layer))


def matrix_gradients(
    backend: str, products: Sequence[MatrixProducts], dtypes: tuple[jnp.dtype, jnp.dtype], accumulators: Matrices | None
) -> Matrices:
    """Returns the matrices' gradients, each summed over the parts and added to its accumulator, if there is one."""
    into = (None, None) if accumulators is None else accumulators
    of_gate_up, of_down = [part.gate_up for part in products], [part.down for part in products]
    return Matrices(
        grouped_outer_of_parts(backend, of_gate_up, dtypes[0], into[0]),
        grouped_outer_of_parts(backend, of_down, dtypes[1], into[1]),
    )


def _bias_sums(products: Sequence[MatrixProducts]) -> Float[Array, "experts 2*inter"]:
    """Returns the sum of each expert's rows of dh over the parts, in at least f32."""
    of_parts = []
    for dh, _, of_rows, *_ in (part.gate_up for part in products):
        ones = jnp.ones((of_rows.num_rows, 1), dh.dtype)
        of_parts.append(grouped_outer(ones, dh, of_rows, at_least_f32(dh.dtype))[:, 0])
    return sum_in_order(jnp.stack(of_parts), axis=0)


def _dtypes(matrices: Matrices) -> tuple[jnp.dtype, jnp.dtype]:
    return matrices.gate_up.dtype, matrices.down.dtype


def _has_room_for_all(max_pairs: int | None, experts: Array) -> bool:
    return max_pairs is None or max_pairs >= experts.size


def _one_after_the_other(steps: Iterable[_Step]) -> list[_Outcome]:
    """Runs the steps in order; none begins before the result of the one before it is there.

    Without the barriers the compiler fuses small operations of several steps, and the first result comes with the last.
    """
    outcomes: list[_Outcome] = []
    for function, arguments in steps:
        if outcomes:
            outcomes[-1], arguments = _wait_for(outcomes[-1], arguments)
        outcomes.append(function(*arguments))
    return outcomes


def _wait_for(outcome: _Outcome, arguments: Any) -> tuple[_Outcome, Any]:
    """Returns both unchanged; the arguments are available only after the outcome's result."""
    result, arguments = jax.lax.optimization_barrier((outcome.result, arguments))
    return outcome._replace(result=result), arguments


def split_tokens(a: Array, size: int, fill: int) -> Array:
    """Splits [T, ...] into [chunks, size, ...], the last chunk padded with `fill`."""
    chunks = -(-a.shape[0] // size)
    a = jnp.pad(a, [(0, chunks * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
    return a.reshape(chunks, size, *a.shape[1:])


def join_tokens(a: Array, tokens: int) -> Array:
    """Undoes `split_tokens`."""
    return a.reshape(-1, *a.shape[2:])[:tokens]


def _with_gradients(optimize_remat: bool) -> Callable:
    op = jax.custom_vjp(_without_gradients, nondiff_argnums=(1,))
    op.defvjp(forward_pass, _backward, optimize_remat=optimize_remat)
    return jax.jit(op, static_argnums=1)


_compiled, _interpreted = _with_gradients(optimize_remat=True), _with_gradients(optimize_remat=False)
