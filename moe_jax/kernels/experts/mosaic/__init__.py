"""Grouped matmuls on Hopper in Pallas Mosaic GPU: TMA and wgmma, one producer and two consumer warpgroups, persistent blocks.

Cost for R rows, E experts, weights [E, N, K]: 2*R'*N*K FLOPs. R' are the rows padded to blocks of 64: on average 32 more per
expert. Tiles of 128 rows pad another 32. Only weights of experts that have rows are read. Each output element is one sum over k
in steps of 16, in one order for every tile. The bits of a row do not depend on other rows.

On a CPU the kernels run in JAX's GPU interpreter, slowly.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.backends import compute_capability
from moe_jax.kernels.experts import xla
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.mosaic import by_pairs
from moe_jax.kernels.experts.mosaic.by_experts import OuterOperands, outer
from moe_jax.kernels.experts.mosaic.by_rows import RowsOperands, matmul, matmul_gated
from moe_jax.kernels.experts.mosaic.by_rows_backward import matmul_gated_backward
from moe_jax.kernels.experts.mosaic.gather import gather_rows, shared_bytes
from moe_jax.kernels.experts.mosaic.tile_limits import Pass, most_stages
from moe_jax.kernels.experts.mosaic.tiles import choose_tile, shared_tile
from moe_jax.kernels.experts.mosaic.token_sums import columns_at_a_time, sum_rows
from moe_jax.kernels.experts.routing import Plan, int32_ids, is_an_expert
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT, TileShape
from moe_jax.kernels.hopper.pipeline import SHARED_MEMORY
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.shapes import EXPERT_NAMES

__all__ = [
    "ROW_ALIGNMENT",
    "experts_of_few_pairs",
    "gated_matmul",
    "gated_matmul_backward",
    "grouped_matmul",
    "grouped_outer",
    "is_native",
    "refusal",
    "rows_of_tokens",
    "token_sums",
]


def refusal(dtype: jnp.dtype, hidden: int, inter: int, names: tuple[str, str, str] = EXPERT_NAMES) -> str | None:
    """Returns why this backend does not support such experts, with the supported sizes; None if it does."""
    if not is_interpreted() and compute_capability() != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this is {compute_capability() or 'no NVIDIA GPU'}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"{names[0]} is {jnp.dtype(dtype).name}; it computes in bfloat16 and float16"
    for name, size in zip(names[1:], (hidden, inter), strict=True):
        if size % 64 or not size:
            return f"{name} is {size}; it must be a multiple of 64"
    if (needed := shared_bytes(hidden, jnp.dtype(dtype).itemsize)) > SHARED_MEMORY:
        return f"{names[1]} is {hidden}; gathering such rows takes {needed} bytes of shared memory; a core has {SHARED_MEMORY}"
    return None


def is_native() -> bool:
    """Returns True on a Hopper GPU, where this backend runs at full speed (elsewhere it is interpreted)."""
    return compute_capability() == "9.0"


def rows_of_tokens(
    x: Float[Array, "tokens hidden"], plan: Plan, *, for_gradients: bool = True
) -> tuple[Float[Array, "sources hidden"], Int[Array, "rows"] | None]:
    """Returns (array, source_of_row), so that the matmuls below read x in expert order, gathered now or on load.

    With `for_gradients`, two matmuls read each row, and need zeros for rows without a pair: rows are gathered once for both. A
    forward pass without gradients gathers rows on use. If `plan.holds_all_tokens` it reads x itself. XLA gathers rows that are
    too wide for the kernel's shared memory.
    """
    if plan.holds_all_tokens:
        # Pallas copies fewer than 8 rows into a swizzled tile, or a multiple of 8.
        return jnp.pad(x, ((0, -x.shape[0] % 8 if x.shape[0] > 8 else 0), (0, 0))), None
    if not for_gradients or not plan.num_rows:
        return x, plan.token_of_row
    fits = shared_bytes(x.shape[1], x.dtype.itemsize) <= SHARED_MEMORY
    return gather_rows(x, plan) if fits else _take(x, plan.token_of_row), None


def experts_of_few_pairs(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "*layers experts 2*inter hidden"],
    w_down: Float[Array, "*layers experts hidden inter"],
    topk_experts: Int[Array, "tokens k"],
    layer: Int[Array, ""] | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens*k hidden"] | None:
    """Computes both expert matmuls for a few (token, expert) pairs; returns outputs in pair order, 0 for invalid ids.

    For forward passes with few pairs, for which a plan costs too much. None for more pairs or unsupported sizes
    (`by_pairs.takes`). `layer` is `Plan.layer`; weights must then have x's dtype.
    """
    num_experts = w_down.shape[-3]
    if not by_pairs.takes(topk_experts, num_experts, *w_down.shape[-2:]):
        return None
    ids = int32_ids(topk_experts, num_experts)
    if layer is not None:
        if {w_gate_up.dtype, w_down.dtype} != {x.dtype}:
            return None
        ids = jnp.where(is_an_expert(ids, num_experts), ids + layer * num_experts, -1)
        w_gate_up, w_down = (w.reshape(-1, *w.shape[-2:]) for w in (w_gate_up, w_down))
    return by_pairs.experts_of_pairs(x, w_gate_up.astype(x.dtype), w_down.astype(x.dtype), ids, activation)


def grouped_matmul(
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts n m"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    transpose: bool = False,
    change: RowsChange | None = None,
) -> Float[Array, "rows out"]:
    """Returns y[r] = x[source_of_row[r]] @ w[e].T, or @ w[e] with `transpose`, where e is row r's expert.

    As `xla.grouped_matmul`, but rows without a pair may be left unwritten. Weights of another dtype are cast to x's first.
    `change` is added to the weights, as additional steps of the same sum.
    """
    x = _take(x, source_of_row)
    w, plan = _weights_to_read(w, plan, x.dtype)
    tile = _tile("grouped_matmul_transposed" if transpose else "grouped_matmul", w.shape[1:], plan)
    return matmul(x, w, plan, tile, transpose=transpose, change=change)


def gated_matmul(
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts 2*inter in"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    keep_h: bool = True,
    change: RowsChange | None = None,
    activation: Activation = SILU,
    bias: Float[Array, "experts 2*inter"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"]]:
    """Computes h = [gate | up] and act = activation(gate, up) in one kernel, gathering rows by source_of_row.

    Rows without a pair may be left unwritten. `change` is as in `grouped_matmul`; rows must then be in order. `bias` is added
    to the sums of its expert; the plan then has no layer.
    """
    w, plan = _weights_to_read(w, plan, x.dtype)
    tile = _tile("gated_matmul", w.shape[1:], plan)
    if is_interpreted():
        x, source_of_row = _take(x, source_of_row), None
    if source_of_row is not None:
        # Copies of 16 bytes have a longer latency than TMA copies.
        tile = dataclasses.replace(tile, stages=min(tile.stages + 1, most_stages("gated_matmul", tile)))
    operands = RowsOperands(x, w, source_of_row, change, bias)
    return matmul_gated(operands, plan, tile, keep_h=keep_h, activation=activation)


def gated_matmul_backward(
    dy: Float[Array, "sources out"],
    w_down: Float[Array, "*layers experts out inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    change: RowsChange | None = None,
    activation: Activation = SILU,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Computes dh, weighted act and dv from dy in one kernel. Rows of no expert are left unwritten. `change` is w_down's."""
    dy = _take(dy, source_of_row)
    w_down, plan = _weights_to_read(w_down, plan, dy.dtype)
    tile = _tile("gated_matmul_backward", w_down.shape[1:], plan)
    return matmul_gated_backward(dy, w_down, h, weight_of_row, plan, tile, change, activation)


def token_sums(
    rows: Float[Array, "rows features"],
    plan: Plan,
    weights: Float[Array, "tokens k"] | None = None,
    shares: int | None = None,
) -> list[Float[Array, "share features"]]:
    """Computes y[t] = sum_k weights[t, k] * rows[row(t, k)] of each share of the tokens, in a kernel or in XLA.

    A kernel computes it if `shares` is given, features are a multiple of 512 and there are at most 8 choices. If all rows are
    on this device XLA is as fast: both run at the memory's speed.
    """
    tokens, k = plan.row_of_pair.shape
    columns = columns_at_a_time(rows.shape[1], k)
    if shares is None or columns is None or tokens < shares:
        return xla.token_sums(rows, plan, weights, shares)
    return [sum_rows(rows, plan, weights, columns=columns, share=share, shares=shares) for share in range(shares)]


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
    """Returns dw[e] = accumulate_into[e] + sum over expert e's rows r of outer(a[r], b[r]).

    Padding rows of an expert's last block must be zero in a or b, and finite in the other.
    """
    return grouped_outer_of_parts([(a, b, plan, a_source_of_row, b_source_of_row)], dtype, accumulate_into)


def grouped_outer_of_parts(
    parts: Sequence[tuple[Array, Array, Plan, Array | None, Array | None]],
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "*layers experts n m"] | None = None,
) -> Float[Array, "*layers experts n m"]:
    """Computes `grouped_outer` summed over several `xla.OuterPart`s in one kernel, in f32, rounded once."""
    a, b, plan, _, _ = parts[0]
    matrix, num_experts = (a.shape[1], b.shape[1]), plan.num_experts
    with_rows = [OuterOperands(_take(a, of_a), _take(b, of_b), plan) for a, b, plan, of_a, of_b in parts if plan.num_rows]
    if not with_rows:
        return jnp.zeros((num_experts, *matrix), dtype) if accumulate_into is None else accumulate_into
    max_pairs = sum(part.plan.max_pairs for part in with_rows)
    tile = choose_tile("grouped_outer", matrix, max_pairs / num_experts)
    if accumulate_into is not None and is_interpreted() and matrix[1] % tile.columns:
        # The interpreter reads the accumulator by loads without bounds checks.
        tile = shared_tile("grouped_outer", matrix, max_pairs / num_experts)
    if accumulate_into is None:
        return outer(with_rows, tile, dtype)
    of_all_layers = accumulate_into.reshape(-1, *matrix)
    return outer(with_rows, tile, dtype, of_all_layers).reshape(accumulate_into.shape)


def _weights_to_read(
    w: Float[Array, "*layers experts n m"], plan: Plan, dtype: jnp.dtype
) -> tuple[Float[Array, "all_experts n m"], Plan]:
    """Returns the weights in `dtype`, and the plan of a kernel that reads them.

    A kernel reads a layer's experts inside the stack. Weights of another dtype are sliced out first, so that only this layer is
    cast.
    """
    if plan.layer is None or w.dtype != dtype:
        # `expert_of_block` indexes experts in the stack.
        return xla.of_layer(w, plan.layer).astype(dtype), dataclasses.replace(plan, layer=None, expert_of_block=None)
    return w.reshape(-1, *w.shape[2:]), plan


def _take(x: Array, source_of_row: Array | None) -> Array:
    return x if source_of_row is None else x.at[source_of_row].get(mode="fill", fill_value=0)


def _tile(pass_name: Pass, matrix: tuple[int, ...], plan: Plan) -> TileShape:
    rows, columns = matrix
    return choose_tile(pass_name, (rows, columns), plan.max_pairs / plan.num_experts)
