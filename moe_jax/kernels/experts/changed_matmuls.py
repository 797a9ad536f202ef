"""Grouped matmuls whose matrices have a low-rank change: W + b a, of which one factor was applied to the rows before.

On Hopper the change takes further steps of the same sum, in one kernel. Elsewhere it is a grouped matmul of its own, whose
result is added.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.activation import gated_silu, gated_silu_backward
from moe_jax.kernels.experts.backends import implementation
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.precision import widened


def changed_matmul(
    backend: str,
    x: Float[Array, "sources in"],
    w: Float[Array, "experts n m"],
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    transpose: bool = False,
) -> Float[Array, "rows out"]:
    """Returns `grouped_matmul` of x with the changed matrices. Rows of no expert may be left unwritten."""
    if backend == "mosaic":
        options: dict[str, Any] = dict(source_of_row=source_of_row, transpose=transpose)
        return mosaic.grouped_matmul(x, w, plan, change=_in_dtype(change, x.dtype), **options)
    matmul = partial(implementation(backend).grouped_matmul, plan=plan, transpose=transpose)
    return matmul(x, w, source_of_row=source_of_row) + matmul(change.rows, change.factor)


def changed_gated_matmul(
    backend: str,
    x: Float[Array, "sources in"],
    w: Float[Array, "experts 2*inter in"],
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"]]:
    """Returns h = [gate | up] and act = silu(gate) * up, h being the product with the changed matrices."""
    if backend == "mosaic":
        h, act = mosaic.gated_matmul(x, w, plan, source_of_row=source_of_row, change=_in_dtype(change, x.dtype))
        assert h is not None
        return h, act
    h = changed_matmul(backend, x, w, plan, change, source_of_row=source_of_row)
    return h, gated_silu(h)


def changed_gated_matmul_backward(
    backend: str,
    dy: Float[Array, "sources out"],
    w_down: Float[Array, "experts out inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns what `gated_matmul_backward` returns, with the changed matrices: dh, weight * act, and the weights' gradients."""
    if backend == "mosaic":
        change = _in_dtype(change, dy.dtype)
        return mosaic.gated_matmul_backward(dy, w_down, h, weight_of_row, plan, source_of_row=source_of_row, change=change)
    g = widened(changed_matmul(backend, dy, w_down, plan, change, source_of_row=source_of_row, transpose=True))
    act, weight = widened(gated_silu(h)), widened(weight_of_row)[:, None]
    return gated_silu_backward(h, weight * g), (weight * act).astype(h.dtype), jnp.sum(g * act, axis=1)


def _in_dtype(change: RowsChange, dtype: jnp.dtype) -> RowsChange:
    return change._replace(factor=change.factor.astype(dtype))
