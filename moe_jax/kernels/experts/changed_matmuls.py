"""Grouped matmuls whose matrices have a low-rank change: W + b a, of which one factor was applied to the rows before.

In the kernels of `mosaic` and `triton` the change takes further steps of the same sum. In `xla` it is a grouped matmul of its
own, whose result is added. So it is where W multiplies in FP8: the change stays in the rows' dtype. So it is where W lies in a
stack of layers, too. The factors are of one layer, and a kernel has one number for the expert of both.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.activation import SILU, Activation, activated, gradients_of_rows
from moe_jax.kernels.experts.backends import implementation
from moe_jax.kernels.experts.fp8 import backends as fp8_backends
from moe_jax.kernels.experts.fp8.passes import Fp8Options
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, QuantisedRows, quantise_rows, transposed
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.low_rank import RowsChange


class ChangedOptions(NamedTuple):
    """The static choices of a call."""

    backend: str
    """The backend of the changes, and of the matrices without `fp8`."""
    fp8: Fp8Options | None = None
    """The matrices are `QuantisedMatrices`, and multiply rows that are rounded to FP8. None: in the rows' dtype."""

    activation: Activation = SILU

    @property
    def row_alignment(self) -> int:
        """The row_alignment of plans."""
        return implementation(self.backend).ROW_ALIGNMENT if self.fp8 is None else self.fp8.row_alignment


def changed_matmul(
    options: ChangedOptions,
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts n m"] | QuantisedMatrices,
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
    transpose: bool = False,
) -> Float[Array, "rows out"]:
    """Returns `grouped_matmul` of x with the changed matrices. Rows of no expert may be left unwritten.

    With `plan.layer`, w is a stack of layers. The change's factor is always of one layer.
    """
    given: dict[str, Any] = dict(source_of_row=source_of_row, transpose=transpose)
    backend = implementation(options.backend)
    if _adds_in_kernel(options, w, plan):
        return backend.grouped_matmul(x, w, plan, change=_in_dtype(change, x.dtype), **given)
    matmul = backend.grouped_matmul
    if isinstance(w, QuantisedMatrices):
        assert options.fp8 is not None
        in_fp8 = fp8_backends.implementation(options.fp8.matmuls).grouped_matmul
        product = in_fp8(_rounded(x, source_of_row), transposed(w) if transpose else w, plan)
    else:
        product = matmul(x, w, plan, **given)
    return product + matmul(change.rows, change.factor, factors_plan(plan), transpose=transpose)


def factors_plan(plan: Plan) -> Plan:
    """Returns the plan of matmuls with factors of a change, which are of one layer whatever the matrices are."""
    return dataclasses.replace(plan, layer=None)


def changed_gated_matmul(
    options: ChangedOptions,
    x: Float[Array, "sources in"],
    w: Float[Array, "*layers experts 2*inter in"] | QuantisedMatrices,
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"]]:
    """Returns h = [gate | up] and act = activation(gate, up), h being the product with the changed matrices."""
    if _adds_in_kernel(options, w, plan):
        given: Any = dict(source_of_row=source_of_row, activation=options.activation)
        h, act = implementation(options.backend).gated_matmul(x, w, plan, change=_in_dtype(change, x.dtype), **given)
        assert h is not None
        return h, act
    h = changed_matmul(options, x, w, plan, change, source_of_row=source_of_row)
    return h, activated(h, options.activation)


def changed_gated_matmul_backward(
    options: ChangedOptions,
    dy: Float[Array, "sources out"],
    w_down: Float[Array, "experts out inter"] | QuantisedMatrices,
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns what `gated_matmul_backward` returns, with the changed matrices: dh, weight * act, and the weights' gradients."""
    if _adds_in_kernel(options, w_down, plan):
        backward = implementation(options.backend).gated_matmul_backward
        given: Any = dict(source_of_row=source_of_row, activation=options.activation)
        return backward(dy, w_down, h, weight_of_row, plan, change=_in_dtype(change, dy.dtype), **given)
    g = changed_matmul(options, dy, w_down, plan, change, source_of_row=source_of_row, transpose=True)
    return gradients_of_rows(h, g, weight_of_row, options.activation)


def _adds_in_kernel(options: ChangedOptions, w: Float[Array, "*layers experts n m"] | QuantisedMatrices, plan: Plan) -> bool:
    """Returns True if a kernel adds the change's products to those of w."""
    return options.backend in ("mosaic", "triton") and plan.layer is None and not isinstance(w, QuantisedMatrices)


def _rounded(x: Float[Array, "sources in"], source_of_row: Int[Array, "rows"] | None) -> QuantisedRows:
    """Rounds rows to FP8, each once, and takes them in expert order; rows without a source are zeros."""
    values, scales = rows = quantise_rows(x)
    if source_of_row is None:
        return rows
    take = partial(jnp.take, indices=source_of_row, mode="fill", fill_value=0)
    return QuantisedRows(take(values, axis=0), take(scales, axis=1))


def _in_dtype(change: RowsChange, dtype: jnp.dtype) -> RowsChange:
    return change._replace(factor=change.factor.astype(dtype))
