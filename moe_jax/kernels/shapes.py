"""Shape checks whose message names the argument, the shape found and the shape wanted."""

from jaxtyping import Array


def check_shape(name: str, array: Array, wanted: str, sizes: dict[str, int]) -> None:
    """Checks `array` against axes such as "experts 2*inter hidden"; axes not yet in `sizes` are learnt from it.

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
