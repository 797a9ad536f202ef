"""Grouped matmuls in plain XLA, for every platform.

Cost for R rows, E experts, weights [E, N, D]: 2*(R + E*direct_rows)*N*D FLOPs at most. Each expert's weights are read once, and
once more per overflow block. `lax.ragged_dot` needs 2*E*R*N*D on CPU and GPU.

An expert's rows are one contiguous run of unknown length, while XLA's shapes are static. So each expert's first `direct_rows`
rows go through one batched matmul with the weights in place; under even routing these are all rows. An expert's remaining rows
are cut into blocks. A loop with the minimum number of turns multiplies the blocks with gathered weights. Memory and work stay
proportional to R under any routing, even if one expert gets every row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from moe_jax.kernels.experts.activation import SILU, Activation, activated, gradients_of_rows
from moe_jax.kernels.experts.routing import Plan, rows_of_pairs, sum_of_choices
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import EXPERT_NAMES, vary_as

ROW_ALIGNMENT = 1
"""The row_alignment of plans for this backend; it computes plans of any other alignment too."""

WORKSPACE_BYTES = 256 * 2**20
"""Bytes of gathered rows, cast weights and f32 sums alive in one group of experts: a group still fills a large GPU, and f32
master weights are never cast as a whole."""

ROWS_PER_TURN = 1024
"""Rows that one turn of the overflow loop multiplies: above it a GPU is busy, below it padding in the last turn is cheap."""

BLOCKS_PER_TURN = 8
"""Maximum overflow blocks in one turn: each gathers one expert's weights."""


def refusal(dtype: jnp.dtype, hidden: int, inter: int, names: tuple[str, str, str] = EXPERT_NAMES) -> str | None:
    """Returns None: this backend computes all experts."""
    return None


def is_native() -> bool:
    """Returns True: XLA runs on every platform."""
    return True


def rows_of_tokens(
    x: Float[Array, "tokens hidden"], plan: Plan, *, for_gradients: bool = True
) -> tuple[Array, Int[Array, "rows"]]:
    """Returns (array, source_of_row), so that the matmuls below read x in expert order.

    `for_gradients`: True if a backward pass follows. This backend always gathers rows on use; rows without a pair are zero.
    """
    return x, plan.token_of_row


def gated_matmul(
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts 2*inter in"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    keep_h: bool = True,
    activation: Activation = SILU,
    bias: Float[Array, "experts 2*inter"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"]]:
    """Computes h[r] = w[e] x[source_of_row[r]] = [gate | up] (None without `keep_h`) and act = activation(gate, up).

    A `bias` is added to the rows of its expert.
    """
    h = with_bias(grouped_matmul(x, w, plan, source_of_row=source_of_row), bias, plan)
    return h if keep_h else None, activated(h, activation)


def with_bias(h: Float[Array, "rows out"], bias: Float[Array, "experts out"] | None, plan: Plan) -> Float[Array, "rows out"]:
    """Adds the bias of each row's expert in at least f32; returns h itself without a bias."""
    if bias is None:
        return h
    return (widened(h) + bias.at[plan.expert_of_row].get(mode="fill", fill_value=0)).astype(h.dtype)


def gated_matmul_backward(
    dy: Float[Array, "sources out"],
    w_down: Float[Array, "*layers experts out inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    activation: Activation = SILU,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Computes the gradients through the down matmul and the activation, y = sum_k weight * w_down act.

    With g = dy @ w_down[e], returns three arrays:

    - dh, the gradient to h;
    - weight_of_row * act, which the gradient of w_down needs;
    - <g, act>, the gradient to each row's weight, in at least f32.
    """
    g = grouped_matmul(dy, w_down, plan, source_of_row=source_of_row, transpose=True)
    return gradients_of_rows(h, g, weight_of_row, activation)


def grouped_matmul(
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts n m"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    transpose: bool = False,
) -> Float[Array, "rows out"]:
    """Computes y[r] = x[source_of_row[r]] @ w[e].T, or @ w[e] with `transpose`, where e is row r's expert.

    w is [experts, out, in], with `transpose` [experts, in, out]; it is cast to x's dtype for use. `source_of_row` is the
    identity if None. Sums in f32 (f64 for f64), the result in x's dtype. Rows without an expert are 0.
    """
    w, num_rows = of_layer(w, plan.layer), len(plan.token_of_row)
    out = w.shape[2] if transpose else w.shape[1]
    if num_rows == 0:
        return jnp.zeros((0, out), x.dtype)
    contract = ((2,), (1,)) if transpose else ((2,), (2,))

    def multiply(blocks: Array, weights: Array) -> Array:
        y = _batched_dot(blocks, weights.astype(x.dtype), contract)
        return y.astype(x.dtype)

    matrix_bytes = math.prod(w.shape[1:]) * x.dtype.itemsize
    workspace = Workspace(matrix_bytes, 0 if w.dtype == x.dtype else matrix_bytes, x.shape[1] * x.dtype.itemsize)
    return multiply_by_experts(taker(x, source_of_row, num_rows), w, multiply, plan, workspace)


def of_layer(weights: Num[Array, "*layers experts n m"], layer: Int[Array, ""] | None) -> Num[Array, "experts n m"]:
    """Slices one layer from stacked weights; returns the weights unchanged if `layer` is None.

    The slice is a copy, unless the index is a loop counter.
    """
    if layer is None:
        return weights
    return jax.lax.dynamic_index_in_dim(weights, layer, keepdims=False, allow_negative_indices=False)


class Workspace(NamedTuple):
    """Temporary memory in bytes that `multiply_by_experts` uses beyond its operands."""

    matrix: int
    """The matrices of one expert, gathered."""
    cast: int
    """The cast matrices of one expert, if they are read in place and `multiply` casts them."""
    row: int
    """One row."""


def multiply_by_experts(
    take: Callable[[Array, Array, int], Any],
    w: Any,
    multiply: Callable[[Any, Any], Float[Array, "blocks height out"]],
    plan: Plan,
    workspace: Workspace,
) -> Float[Array, "rows out"]:
    """Multiplies each row by its expert's matrices; rows without an expert yield zeros.

    Args:
        take: a function from `taker` that returns the rows of blocks.
        w: the experts' matrices, a pytree with the experts as leading axis.
        multiply: computes the products of blocks of rows with one expert's matrices each.
        plan: must have at least one row.
        workspace: the bytes that bound a group of experts and a turn of the loop.
    """
    num_experts, num_rows = len(plan.ends), len(plan.token_of_row)
    # With fewer rows most experts are idle, and the loop reads only the weights of experts that have rows.
    direct_rows = _direct_rows(num_rows, num_experts) if 2 * num_rows >= num_experts else 0
    height = min(_block_height(num_rows, num_experts), num_rows)
    per_turn = min(BLOCKS_PER_TURN, max(1, ROWS_PER_TURN // height))
    per_turn = max(1, min(per_turn, WORKSPACE_BYTES // workspace.matrix))

    if direct_rows:
        group = _group_size(num_experts, workspace.cast + direct_rows * workspace.row)
        starts, ends = plan.offsets[:-1], plan.offsets[1:]
        direct = _map_groups(lambda s, e, ws: multiply(take(s, e, direct_rows), ws), group, starts, ends, w)
        position = jnp.arange(num_rows) - plan.offsets[plan.expert_of_row]
        is_direct = (position < direct_rows) & (plan.expert_of_row < num_experts)
        slot = jnp.where(is_direct, plan.expert_of_row * direct_rows + position, 0)
        out = direct.shape[-1]
        y = jnp.where(is_direct[:, None], direct.reshape(-1, out).at[slot].get(mode="promise_in_bounds"), 0)
    else:
        block = jnp.zeros(1, jnp.int32)
        like = jax.eval_shape(lambda: multiply(take(block, block, height), jax.tree.map(lambda a: a[:1], w)))
        y = vary_as(jnp.zeros((num_rows, like.shape[-1]), like.dtype), (plan.offsets, w))

    first_block, block_expert, block_start, block_end = _overflow_blocks(plan, direct_rows, height, per_turn)

    def turn(i: Array, y: Array) -> Array:
        block_of_turn = (block_expert, block_start, block_end)
        expert, start, end = (jax.lax.dynamic_slice_in_dim(a, i * per_turn, per_turn) for a in block_of_turn)
        # Near the last row a block is shifted up to stay inside y; rows that it does not own keep their values.
        top = jnp.minimum(start, num_rows - height)
        row = top[:, None] + jnp.arange(height, dtype=jnp.int32)
        is_own = (row >= start[:, None]) & (row < end[:, None])
        blocks = multiply(take(top, end, height), jax.tree.map(lambda a: a[expert], w))
        for j in range(per_turn):
            before = jax.lax.dynamic_slice_in_dim(y, top[j], height)
            y = jax.lax.dynamic_update_slice_in_dim(y, jnp.where(is_own[j, :, None], blocks[j], before), top[j], axis=0)
        return y

    # The loop counts in ones: XLA drops a loop that counts in larger steps when it knows that one turn is enough.
    return jax.lax.fori_loop(0, -(-first_block[-1] // per_turn), turn, y)


def token_sums(
    rows: Float[Array, "rows features"],
    plan: Plan,
    weights: Float[Array, "tokens k"] | None = None,
    shares: int | None = None,
) -> list[Float[Array, "share features"]]:
    """Computes y[t] = sum_k weights[t, k] * rows[row(t, k)] over the choices that an expert computes; default weights are 1.

    Sums in f32 (f64 for f64), the result in rows' dtype. With `shares`, equal numbers of tokens come from `shares` devices, and
    most of their choices are computed elsewhere. The result has one array for each share of the tokens.
    """
    tokens, sums = plan.row_of_pair.shape[0] // (shares or 1), []
    for share in range(shares or 1):
        own = slice(share * tokens, (share + 1) * tokens)
        summands = rows_of_pairs(widened(rows), plan, own)
        sums.append(sum_of_choices(summands, None if weights is None else weights[own]).astype(rows.dtype))
    return sums


def grouped_outer(
    a: Float[Array, "a_sources n"],
    b: Float[Array, "b_sources m"],
    plan: Plan,
    dtype: jnp.dtype,
    *,
    a_source_of_row: Int[Array, "rows"] | None = None,
    b_source_of_row: Int[Array, "rows"] | None = None,
    accumulate_into: Float[Array, "experts n m"] | None = None,
) -> Float[Array, "experts n m"]:
    """Computes dw[e] = sum over the rows r of expert e of outer(a[a_source_of_row[r]], b[b_source_of_row[r]]), in `dtype`.

    Sums in f32 (f64 for f64) in a fixed order, rounded to `dtype` once. An expert without rows gets exact zeros.

    With `accumulate_into` the result is accumulate_into + dw, each element added once and rounded once. `dtype` must then be
    the dtype of the sums and of `accumulate_into`. The result takes the same memory, unless something else reads
    `accumulate_into` later. For an expert without rows the result is exactly accumulate_into[e].
    """
    num_experts, num_rows = len(plan.ends), len(plan.token_of_row)
    n, m = a.shape[1], b.shape[1]
    if num_rows == 0:
        return jnp.zeros((num_experts, n, m), dtype) if accumulate_into is None else accumulate_into
    take_a, take_b = taker(a, a_source_of_row, num_rows), taker(b, b_source_of_row, num_rows)
    sum_bytes = jnp.promote_types(a.dtype, jnp.float32).itemsize

    direct_rows, height = _direct_rows(num_rows, num_experts), _block_height(num_rows, num_experts)
    first_block, block_expert, block_start, block_end = _overflow_blocks(plan, direct_rows, height, 1)
    group = _group_size(num_experts, n * m * sum_bytes + direct_rows * (n + m) * a.dtype.itemsize)

    def outer(start: Array, end: Array, rows: int) -> Array:
        return _batched_dot(take_a(start, end, rows), take_b(start, end, rows), ((1,), (1,)))

    def group_sum(experts: Array, starts: Array, ends: Array) -> Array:
        def add_block(i: Array, total: Array) -> Array:
            at = block_expert[i] - experts[0]
            block = jax.lax.dynamic_index_in_dim(total, at) + outer(block_start[i][None], block_end[i][None], height)
            return jax.lax.dynamic_update_index_in_dim(total, block, at, axis=0)

        total = outer(starts, ends, direct_rows)
        return jax.lax.fori_loop(first_block[experts[0]], first_block[experts[-1] + 1], add_block, total).astype(dtype)

    def accumulated(before: Array, experts: Array, starts: Array, ends: Array) -> Array:
        return jnp.where((starts < ends)[:, None, None], before + group_sum(experts, starts, ends), before)

    def add_group(i: Array, totals: Array) -> Array:
        of_group = [jax.lax.dynamic_slice_in_dim(a, i * group, group) for a in (totals, *per_expert)]
        return jax.lax.dynamic_update_slice_in_dim(totals, accumulated(*of_group), i * group, axis=0)

    per_expert = jnp.arange(num_experts, dtype=jnp.int32), plan.offsets[:-1], plan.offsets[1:]
    if accumulate_into is None:
        return _map_groups(group_sum, group, *per_expert)
    if group == num_experts:
        return accumulated(accumulate_into, *per_expert)
    return jax.lax.fori_loop(0, num_experts // group, add_group, accumulate_into)


class OuterPart(NamedTuple):
    """Operands of a `grouped_outer` for one group of tokens."""

    a: Float[Array, "a_sources n"]
    b: Float[Array, "b_sources m"]
    plan: Plan
    a_source_of_row: Int[Array, "rows"] | None = None
    b_source_of_row: Int[Array, "rows"] | None = None


def grouped_outer_of_parts(
    parts: Sequence[OuterPart],
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "*layers experts n m"] | None = None,
    outer: Callable[..., Array] = grouped_outer,
) -> Float[Array, "*layers experts n m"]:
    """Sums `grouped_outer` over groups of tokens with the same experts, in at least f32, rounded to `dtype` once.

    The sum is added to `accumulate_into`, which has `dtype`, as in `grouped_outer`: in the same memory, unless something else
    reads `accumulate_into` later. If the plans are of a layer of a stack, `accumulate_into` is the stack.

    Args:
        outer: a backend's `grouped_outer`.
    """
    layer = parts[0].plan.layer
    sum_dtype = dtype if len(parts) == 1 else at_least_f32(dtype)
    total: Any = None if accumulate_into is None else of_layer(accumulate_into, layer)
    for part in parts:
        sources = {"a_source_of_row": part.a_source_of_row, "b_source_of_row": part.b_source_of_row}
        total = outer(part.a, part.b, part.plan, sum_dtype, **sources, accumulate_into=total)
    total = total.astype(dtype)
    if accumulate_into is None or layer is None:
        return total
    return jax.lax.dynamic_update_index_in_dim(accumulate_into, total, layer, 0, allow_negative_indices=False)


def _batched_dot(a: Array, b: Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Multiplies matrices batched over the leading axis, summed in at least f32."""
    return jax.lax.dot_general(a, b, (contract, ((0,), (0,))), preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def taker(x: Array, source_of_row: Array | None, num_rows: int) -> Callable[[Array, Array, int], Array]:
    """Returns take(starts, ends, height), which gathers rows start <= r < min(end, start + height) per block, then zeros."""

    def take(starts: Array, ends: Array, height: int) -> Array:
        row = starts[:, None] + jnp.arange(height, dtype=jnp.int32)
        valid = row < ends[:, None]
        source = jnp.minimum(row, num_rows - 1)
        if source_of_row is not None:
            source = source_of_row.at[source].get(mode="promise_in_bounds")
            valid &= source < x.shape[0]
            source = jnp.minimum(source, x.shape[0] - 1)
        return jnp.where(valid[:, :, None], x.at[source].get(mode="promise_in_bounds"), 0)

    return take


def _direct_rows(num_rows: int, num_experts: int) -> int:
    """Returns an expert's mean rows plus three standard deviations of even (Poisson) routing, in eights: few overflow."""
    mean = num_rows / num_experts
    return min(_round_up(mean + 3 * math.sqrt(mean), 8), _round_up(num_rows, 8))


def _block_height(num_rows: int, num_experts: int) -> int:
    """Returns half the mean rows of an expert, in eights, from 32 to 512: the padding of an expert's last block stays small.

    At least 32: a turn of the loop reads an expert's whole matrix, which takes longer than multiplying fewer rows.
    """
    return min(512, max(32, _round_up(num_rows / num_experts / 2, 8)))


def _round_up(value: float, multiple: int) -> int:
    return max(1, math.ceil(value / multiple)) * multiple


def _overflow_blocks(plan: Plan, direct_rows: int, height: int, per_turn: int) -> tuple[Array, Array, Array, Array]:
    """Cuts each expert's rows beyond `direct_rows` into blocks.

    Returns first_block [E + 1] (expert e has blocks first_block[e] to first_block[e + 1]) and, per block, its expert, its
    first row and its end. Empty blocks after the last one pad an incomplete turn.
    """
    starts = plan.offsets[:-1] + direct_rows
    counts = jnp.maximum(plan.offsets[1:] - starts, 0)
    last = jnp.cumsum(-(-counts // height))
    first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), last.astype(jnp.int32)])
    block = jnp.arange(len(plan.token_of_row) // height + len(starts) + per_turn, dtype=jnp.int32)
    # Not `searchsorted`, whose types do not hold in a shard_map that is manual over some of the mesh's axes (jax 0.11.2).
    expert = jnp.sum(first_block[1:] <= block[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(starts) - 1)
    start = starts[expert] + (block - first_block[expert]) * height
    end = jnp.where(block < first_block[-1], jnp.minimum(start + height, plan.offsets[expert + 1]), 0)
    return first_block, expert, start, end


def _group_size(num_experts: int, bytes_per_expert: int) -> int:
    """Returns the experts in one group: the largest divisor of their number that keeps a group within WORKSPACE_BYTES."""
    return max(
        size
        for size in range(1, num_experts + 1)
        if num_experts % size == 0 and (size == 1 or size * bytes_per_expert <= WORKSPACE_BYTES)
    )


def _map_groups(f: Callable[..., Array], group: int, *per_expert: Any) -> Array:
    """Applies f to groups of experts, one after the other; arguments and result have the experts as leading axis."""
    num_experts = per_expert[0].shape[0]
    if group == num_experts:
        return f(*per_expert)
    grouped = jax.tree.map(lambda a: a.reshape(num_experts // group, group, *a.shape[1:]), per_expert)
    result = jax.lax.map(lambda args: f(*args), grouped)
    return result.reshape(num_experts, *result.shape[2:])
