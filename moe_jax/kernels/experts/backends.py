"""Matmuls of rows sorted by expert with each expert's own weights, one module per backend.

Every backend module offers what `xla` describes: `grouped_matmul`, `grouped_outer`, their fusions with the gated activation
`gated_matmul` and `gated_matmul_backward`, `rows_of_tokens` before and `token_sums` behind them, `refusal`, `is_native` and
`ROW_ALIGNMENT`.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts import mosaic, triton, xla
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.precision import at_least_f32

MODULES = {"mosaic": mosaic, "triton": triton, "xla": xla}
"""By name, the fastest first where it runs."""


def implementation(backend: str) -> ModuleType:
    """The module of a backend that `resolve_backend` returned."""
    return MODULES[backend]


class OuterPart(NamedTuple):
    """The operands of a `grouped_outer`."""

    a: Float[Array, "a_sources n"]
    b: Float[Array, "b_sources m"]
    plan: Plan
    a_source_of_row: Int[Array, "rows"] | None = None
    b_source_of_row: Int[Array, "rows"] | None = None


def grouped_outer_of_parts(
    backend: str,
    parts: Sequence[OuterPart],
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "experts n m"] | None = None,
) -> Float[Array, "experts n m"]:
    """The sum of `grouped_outer` over parts with the same experts, in at least f32 and rounded to `dtype` once.

    To `accumulate_into`, of `dtype`, it is added as `grouped_outer` does: in the same memory unless something else reads that
    later.
    """
    if backend == "mosaic":
        return mosaic.grouped_outer_of_parts(parts, dtype, accumulate_into)
    sum_dtype = dtype if len(parts) == 1 else at_least_f32(dtype)
    total: Any = accumulate_into
    for a, b, plan, a_source, b_source in parts:
        sources = {"a_source_of_row": a_source, "b_source_of_row": b_source}
        total = implementation(backend).grouped_outer(a, b, plan, sum_dtype, **sources, accumulate_into=total)
    return total.astype(dtype)
