"""Checks of shapes; an error names the argument, the shape found and the shape wanted."""

import jax.numpy as jnp
from jaxtyping import Array


def check_experts_mlp(
    x: Array, w_gate_up: Array, w_down: Array, topk_weights: Array, topk_experts: Array, *, experts: str = "experts"
) -> dict[str, int]:
    """Checks the arguments of a layer of experts and returns the length of each axis; `experts` is the name of the first axis.

    Raises:
        ValueError: shapes that do not fit together, a non-integer topk_experts, an x of integers, or axes of length 0.
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
    """Checks `array` against axes such as "experts 2*inter hidden"; axes not yet in `sizes` are added to it.

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
