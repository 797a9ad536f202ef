"""Matmuls of rows sorted by expert with each expert's own weights, one module per backend.

Every backend module offers the same names, which `xla` describes:

- `grouped_matmul` and `grouped_outer`;
- their fusions with the gated activation, `gated_matmul` and `gated_matmul_backward`;
- `rows_of_tokens` before these, and `token_sums` behind them;
- `refusal`, `is_native` and `ROW_ALIGNMENT`.
"""

import functools
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.routing import Plan, of_own_layer
from moe_jax.kernels.precision import at_least_f32

BACKENDS = ("mosaic", "triton", "xla")
"""Every backend, the fastest first: `mosaic` runs on Hopper GPUs, `triton` on NVIDIA GPUs from Ampere on, `xla` everywhere.
In f32 `xla` is before `triton`: on an H200 2.4 times as fast with exact products, 8 times with TF32's."""


@functools.cache
def implementation(backend: str) -> ModuleType:
    """Returns the module of a backend. It is imported on first use: Pallas Mosaic GPU costs a second of CPU time."""
    return import_module(f"moe_jax.kernels.experts.{backend}")


class OuterPart(NamedTuple):
    """The operands of a `grouped_outer`, for one part of the tokens."""

    a: Float[Array, "a_sources n"]
    b: Float[Array, "b_sources m"]
    plan: Plan
    a_source_of_row: Int[Array, "rows"] | None = None
    b_source_of_row: Int[Array, "rows"] | None = None


def grouped_outer_of_parts(
    backend: str,
    parts: Sequence[OuterPart],
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "*layers experts n m"] | None = None,
) -> Float[Array, "*layers experts n m"]:
    """Computes the sum of `grouped_outer` over parts with the same experts, in at least f32, rounded to `dtype` once.

    The sum is added to `accumulate_into`, which has `dtype`, as in `grouped_outer`: in the same memory, unless something else
    reads `accumulate_into` later. If the plans are of a layer of a stack, `accumulate_into` is the stack.
    """
    if backend == "mosaic":
        return implementation(backend).grouped_outer_of_parts(parts, dtype, accumulate_into)
    layer = parts[0].plan.layer
    sum_dtype = dtype if len(parts) == 1 else at_least_f32(dtype)
    total: Any = None if accumulate_into is None else of_own_layer(accumulate_into, parts[0].plan)
    for part in parts:
        sources = {"a_source_of_row": part.a_source_of_row, "b_source_of_row": part.b_source_of_row}
        total = implementation(backend).grouped_outer(part.a, part.b, part.plan, sum_dtype, **sources, accumulate_into=total)
    total = total.astype(dtype)
    if accumulate_into is None or layer is None:
        return total
    return jax.lax.dynamic_update_index_in_dim(accumulate_into, total, layer, 0, allow_negative_indices=False)
