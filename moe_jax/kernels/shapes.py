"""The types of an op's arguments: checks of their shapes, and the mesh axes over which they vary.

Inside `jax.shard_map` an array's type records the mesh axes over which devices may hold different values (it *varies*). A
function with a custom gradient must type its results and gradients as varying. Otherwise the sum of a replicated argument's
gradient over the devices is missing. If all arguments are first cast to vary over the same axes, the gradient of the cast is
that sum. Under `check_vma=False`, and outside `shard_map`, nothing varies and these functions do nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

EXPERT_NAMES = ("x", "hidden", "inter")
"""The tokens and both sizes of an expert's matrices, as errors name them."""


def check_experts_mlp(
    x: Array, w_gate_up: Array, w_down: Array, topk_weights: Array, topk_experts: Array, *, experts: str = "experts"
) -> dict[str, int]:
    """Checks the shapes of an expert layer's arguments; returns axis lengths by name. `experts` names the expert axis.

    Raises:
        ValueError: shapes that do not match, a non-integer topk_experts, an x of integers, or axes of length 0.
    """
    sizes: dict[str, int] = {}
    check_shape("x", x, "tokens hidden", sizes)
    check_shape("w_down", w_down, f"{experts} hidden inter", sizes)
    check_shape("w_gate_up", w_gate_up, f"{experts} 2*inter hidden", sizes)
    check_shape("topk_experts", topk_experts, "tokens k", sizes)
    check_shape("topk_weights", topk_weights, "tokens k", sizes)
    if not jnp.issubdtype(topk_experts.dtype, jnp.integer):
        raise ValueError(f"topk_experts must have an integer dtype; got {topk_experts.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must have a floating dtype; got {x.dtype}")
    if not sizes["hidden"] or not sizes["inter"]:
        raise ValueError(f"hidden and inter must be at least 1; got {sizes['hidden']} and {sizes['inter']}")
    return sizes


def check_shape(name: str, array: Array, wanted: str, sizes: dict[str, int]) -> None:
    """Checks an array's shape against named axes such as "experts 2*inter hidden"; adds new axes to `sizes`.

    Raises:
        ValueError: the number of axes or the length of one differs.
    """
    axes = wanted.split()
    expected = [_length(axis, sizes) for axis in axes]
    shape = tuple(array.shape)
    if len(shape) != len(axes) or any(n is not None and n != found for n, found in zip(expected, shape, strict=True)):
        legend = ", ".join(f"{axis}={n}" for axis, n in zip(axes, expected, strict=True) if n is not None)
        raise ValueError(f"{name} must have shape [{', '.join(axes)}]{f' with {legend}' if legend else ''}; got {list(shape)}")
    sizes.update({axis: n for axis, n in zip(axes, shape, strict=True) if "*" not in axis})


def _length(axis: str, sizes: dict[str, int]) -> int | None:
    factor, _, symbol = axis.rpartition("*")
    return int(factor or 1) * sizes[symbol] if symbol in sizes else None


def vary_alike(arguments):
    """Casts each of the arguments (a pytree) to vary over every axis over which any of them varies."""
    return vary_as(arguments, arguments)


def vary_as(results, inputs):
    """Casts each of the results (a pytree) to vary over at least the axes over which a leaf of `inputs` varies."""
    axes = varying_axes(inputs)

    def cast(result):
        missing = tuple(sorted(axes - varying_axes(result)))
        return jax.lax.pcast(result, missing, to="varying") if missing else result

    return jax.tree.map(cast, results)


def refuse_explicit_axes(**arrays: jax.typing.ArrayLike) -> None:
    """Raises if an array is sharded over mesh axes of type Explicit, for which JAX would need all output shardings.

    Raises:
        ValueError: one of the arrays is split over such an axis.
    """
    for name, array in arrays.items():
        spec = jax.typeof(array).sharding.spec
        if any(axis is not None for axis in spec):
            raise ValueError(
                f"{name} is split as {spec} over mesh axes of type Explicit, which jax.make_mesh makes by default; use a mesh "
                "of moe_jax.parallel.make_mesh or one with axis_types=(AxisType.Auto, ...), or call this inside jax.shard_map"
            )


def varying_axes(arrays) -> frozenset[str]:
    """Returns the mesh axes over which a leaf of `arrays` varies."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)))
