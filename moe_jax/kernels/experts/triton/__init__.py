"""Grouped matmuls in Triton, called through jax-triton: any NVIDIA GPU from Ampere on (compute capability 8.0).

Cost for R rows, E experts, weights [E, N, K]: 2*R'*N*K FLOPs. R' counts the rows of each expert, padded to whole tiles of 64 or
128. Only the weights of experts that have rows are read. Rows are gathered while they are loaded. Each output element is one
sum in one order for every tile: the bits of a row do not depend on the other rows.

`triton` and `jax_triton` are optional packages, imported when a kernel is first used.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts import xla
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.launch import (
    capability,
    expert_tile,
    gated_backward_tile,
    missing_packages,
    row_tile,
)
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.shapes import EXPERT_NAMES

ROW_ALIGNMENT = 1
"""A tile loads and stores row by row, so an expert's rows may start anywhere; plans of any alignment are supported."""


def refusal(dtype: jnp.dtype, hidden: int, inter: int, names: tuple[str, str, str] = EXPERT_NAMES) -> str | None:
    """Returns why this backend does not support such experts, with the requirements; None if it does."""
    version = capability()
    if version is None:
        return "it needs an NVIDIA GPU; this is none"
    if version < (8, 0):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or above; this has {version[0]}.{version[1]}"
    if missing_packages() is not None:
        return missing_packages()
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{names[0]} is {jnp.dtype(dtype).name}; it computes in bfloat16, float16 and float32"
    for name, size in zip(names[1:], (hidden, inter), strict=True):
        if size < 1:
            return f"{name} is {size}; it must be at least 1"
    return None


def is_native() -> bool:
    """Returns True on NVIDIA GPUs since Ampere (capability 8.0) with jax-triton installed, where kernels are compiled."""
    return (capability() or (0, 0)) >= (8, 0) and missing_packages() is None


def rows_of_tokens(
    x: Float[Array, "tokens hidden"], plan: Plan, *, for_gradients: bool = True
) -> tuple[Array, Int[Array, "rows"]]:
    """Returns x and token_of_row: the kernels gather rows while loading, and skip rows without a pair."""
    return x, plan.token_of_row


def grouped_matmul(
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts n m"],
    plan: Plan,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    transpose: bool = False,
    change: RowsChange | None = None,
) -> Float[Array, "rows out"]:
    """Computes y[r] = x[source_of_row[r]] @ w[e].T, or @ w[e] with `transpose`, where e is row r's expert.

    Like `xla.grouped_matmul`, but rows without a pair are left unwritten. Weights of another dtype are cast to x's first.
    `change` is added to the weights, as further steps of the same sum; its factor has x's dtype.
    """
    w = xla.of_layer(w, plan.layer)
    out = w.shape[2] if transpose else w.shape[1]
    kernels = _kernels("by_rows")
    operands = kernels.TileOperands(x, w.astype(x.dtype), source_of_row, change)
    return kernels.matmul(operands, plan, row_tile(_rows_per_expert(plan), out, x.dtype), transpose=transpose)


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
    """Computes h = [gate | up] and act = activation(gate, up) in one kernel. Rows without a pair are left unwritten."""
    w = xla.of_layer(w, plan.layer)
    tile = row_tile(_rows_per_expert(plan), w.shape[1], x.dtype)
    kernels = _kernels("by_rows")
    operands = kernels.TileOperands(x, w.astype(x.dtype), source_of_row, change, bias)
    return kernels.matmul_gated(operands, plan, tile, keep_h=keep_h, activation=activation)


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
    """Computes dh, weighted act and dv from dy in one kernel. Rows without a pair are left unwritten. `change` is w_down's."""
    w_down = xla.of_layer(w_down, plan.layer)
    kernels = _kernels("by_rows")
    operands = kernels.TileOperands(dy, w_down.astype(dy.dtype), source_of_row, change)
    return kernels.matmul_gated_backward(operands, h, weight_of_row, plan, gated_backward_tile(dy.dtype), activation)


token_sums = xla.token_sums


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
    """Computes dw[e] = accumulate_into[e] + sum over the rows r of expert e of outer(a[r], b[r]), as `xla.grouped_outer`.

    The padding rows of an expert's last block are not read: they may hold any value.
    """
    if plan.num_rows == 0:
        nothing = jnp.zeros((plan.num_experts, a.shape[1], b.shape[1]), dtype)
        return nothing if accumulate_into is None else accumulate_into
    sources = {"a_source_of_row": a_source_of_row, "b_source_of_row": b_source_of_row}
    tile = expert_tile(b.shape[1], a.dtype, gathers=any(source is not None for source in sources.values()))
    return _kernels("by_experts").outer(a, b, plan, tile, dtype, **sources, accumulate_into=accumulate_into)


def grouped_outer_of_parts(
    parts: Sequence[xla.OuterPart],
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "*layers experts n m"] | None = None,
) -> Float[Array, "*layers experts n m"]:
    """Computes `grouped_outer` summed over groups of tokens, as `xla.grouped_outer_of_parts`."""
    return xla.grouped_outer_of_parts(parts, dtype, accumulate_into, grouped_outer)


def _kernels(module: str) -> Any:
    return importlib.import_module(f"{__name__}.{module}")


def _rows_per_expert(plan: Plan) -> float:
    return plan.max_pairs / plan.num_experts
