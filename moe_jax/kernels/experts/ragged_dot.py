"""Rows in groups, each group times its own matrix: `jax.lax.ragged_dot` with the experts' grouped matmuls.

For m rows lhs [m, k] and matrices rhs [g, k, n], with e(r) the group of row r:

    y[r]    = lhs[r] @ rhs[e(r)]                                [m, n]
    dlhs[r] = dy[r] @ rhs[e(r)].T                               [m, k]
    drhs[e] = sum over the rows r of e of outer(lhs[r], dy[r])  [g, k, n]

Each costs 2*m*k*n FLOPs. Hopper kernels need groups that begin at multiples of 64 rows: lhs and dy are copied to such rows, and
y and dlhs back. Forward and backward together these copies read 2*m*(k+n) elements and write as many.
"""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from moe_jax.kernels.backends import implementation, resolve_backend
from moe_jax.kernels.experts.routing import Plan, plan_of_groups, rows_of_pairs
from moe_jax.kernels.experts.xla import OuterPart
from moe_jax.kernels.shapes import check_shape, refuse_explicit_axes, vary_alike


def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " g"],
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    *,
    backend: str | None = None,
) -> Float[Array, "m n"]:
    """Multiplies each group of rows by its own matrix: `jax.lax.ragged_dot`, with the same arguments.

        y[r] = lhs[r] @ rhs[e] for the next group_sizes[e] rows of each group e; 0 for rows beyond the sum of the sizes

    Group sizes may be traced values and may be 0. The kernels multiply exactly and sum in f32. Differentiable in lhs and rhs,
    in reverse mode and once. Rows beyond the sum get no gradient, and a group without rows gets zeros.

    Args:
        lhs: the rows, sorted by group.
        rhs: one matrix per group.
        group_sizes: the number of rows of each group. Values are not checked, since under jit they are unknown. Negative sizes
            count as 0, and sizes beyond the last row are cut off.
        precision: as in `jax.lax.dot`, one for both operands, for the f32 products of backend "xla". The default is JAX's.
        preferred_element_type: dtype of the result, by default the operands'. A wider one widens the products too, so that bf16
            operands with an f32 result run on "xla".
        group_offset: None. JAX does not implement others either.
        backend: "mosaic" (Hopper GPUs, bf16 and f16; k and n multiples of 64), "triton" (bf16, f16 and f32) or "xla"
            (everywhere). The default is chosen as in `experts_mlp`, and logged.

    Returns:
        y in `preferred_element_type`. Each gradient has the dtype of its argument.

    Raises:
        ValueError: shapes do not match, an operand is not a float, sizes are not integers, or precisions of the operands
            differ. Also if the backend is unknown or does not support the input, or arrays are split over mesh axes of type
            Explicit.
        NotImplementedError: group_offset is given.
    """
    if group_offset is not None:
        raise NotImplementedError(f"group_offset must be None, as in jax.lax.ragged_dot; got {group_offset}")
    sizes: dict[str, int] = {}
    for name, array, axes in (("lhs", lhs, "m k"), ("rhs", rhs, "g k n"), ("group_sizes", group_sizes, "g")):
        check_shape(name, array, axes, sizes)
        wanted: Any = jnp.integer if name == "group_sizes" else jnp.floating
        if not jnp.issubdtype(array.dtype, wanted):
            raise ValueError(f"{name} must have a dtype of {wanted.__name__}; got {array.dtype}")
    refuse_explicit_axes(lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    products = jnp.promote_types(lhs.dtype, rhs.dtype)
    result = products if preferred_element_type is None else jnp.dtype(preferred_element_type)
    products = jnp.promote_types(products, result)
    m, k, _, n = sizes.values()
    if 0 in sizes.values():
        return jnp.zeros((m, n), result)
    backend = resolve_backend(backend, products, k, n, names=("lhs @ rhs", "k", "n"))
    plan = plan_of_groups(group_sizes, m, implementation(backend).ROW_ALIGNMENT)
    operands = vary_alike((lhs.astype(products), rhs.astype(products), plan))
    return _multiply(*operands, backend, _name_of(precision)).astype(result)


def ragged_dot_for_tokamax(
    lhs: Float[Array, "m k"], rhs: Float[Array, "g k n"], *, group_sizes: Any, precision: Any = None, **options: Any
) -> Float[Array, "m n"]:
    """Computes `ragged_dot` in `tokamax.ragged_dot(..., implementation=[ragged_dot_for_tokamax, "mosaic"])`.

    Raises:
        NotImplementedError: an option that only other implementations support; tokamax then calls the next one. Examples are
            an activation, quantised operands, and dimension numbers that `jax.lax.ragged_dot` does not have.
        ValueError: as `ragged_dot`.
    """
    preferred = options.pop("preferred_element_type", None)
    if options.get("ragged_dot_dimension_numbers") == OF_LAX:
        del options["ragged_dot_dimension_numbers"]
    if given := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"moe_jax.kernels.ragged_dot does not support this call's {', '.join(given)}")
    if not all(isinstance(operand, jax.Array | np.ndarray) for operand in (lhs, rhs)):
        raise NotImplementedError(f"lhs and rhs must be arrays; got {type(lhs).__name__} and {type(rhs).__name__}")
    return ragged_dot(lhs, rhs, jnp.asarray(group_sizes), precision, preferred)


OF_LAX = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [1]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""The dimension numbers of `jax.lax.ragged_dot`."""


def _name_of(precision: Any) -> str | None:
    """Returns the precision as a value of JAX's setting jax_default_matmul_precision; None leaves the setting as it is."""
    first, second = precision if isinstance(precision, tuple | list) else (precision, precision)
    if first != second:
        raise ValueError(f"precision must be one for both operands; got {precision}")
    if isinstance(first, jax.lax.Precision):
        return first.name.lower()
    return getattr(first, "name", first)


@partial(jax.jit, static_argnums=(3, 4))
def _multiply(lhs: Array, rhs: Array, plan: Plan, backend: str, precision: str | None) -> Float[Array, "m n"]:
    return _differentiable(lhs, rhs, plan, backend, precision)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(lhs: Array, rhs: Array, plan: Plan, backend: str, precision: str | None) -> Float[Array, "m n"]:
    return _forward(lhs, rhs, plan, backend, precision)[0]


def _forward(lhs: Array, rhs: Array, plan: Plan, backend: str, precision: str | None) -> tuple[Array, tuple]:
    with _products_in(precision):
        return _product(_operand(lhs, plan, backend), rhs, plan, backend, transpose=True), (lhs, rhs, plan)


def _backward(backend: str, precision: str | None, residuals: tuple, dy: Array) -> tuple[Array, Array, None]:
    lhs, rhs, plan = residuals
    (a, of_a), (b, of_b) = (_operand(x, plan, backend) for x in (lhs, dy))
    with _products_in(precision):
        drhs = implementation(backend).grouped_outer_of_parts([OuterPart(a, b, plan, of_a, of_b)], rhs.dtype)
        return _product((b, of_b), rhs, plan, backend, transpose=False), drhs, None


def _products_in(precision: str | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision)


def _operand(x: Array, plan: Plan, backend: str) -> tuple[Array, Array | None]:
    """Returns (array, source_of_row) of the rows in the plan's order."""
    return implementation(backend).rows_of_tokens(x, plan) if plan.row_alignment > 1 else (x, None)


def _product(operand: tuple[Array, Array | None], rhs: Array, plan: Plan, backend: str, *, transpose: bool) -> Array:
    """Computes x[r] @ rhs[e] with `transpose`, else x[r] @ rhs[e].T: the kernels' matrices are [out, in]. Rows are lhs's."""
    x, source = operand
    y = implementation(backend).grouped_matmul(x, rhs, plan, source_of_row=source, transpose=transpose)
    if plan.row_alignment > 1:
        return rows_of_pairs(y, plan)[:, 0]
    return jnp.where(jnp.arange(len(y), dtype=jnp.int32)[:, None] < plan.offsets[-1], y, 0)


_differentiable.defvjp(_forward, _backward)
