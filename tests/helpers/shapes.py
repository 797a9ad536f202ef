"""Compares each call of the package that a test makes with jaxtyping's annotations: shapes and dtypes of all arrays.

`conftest.py` calls `install` before a test imports the package. Kinds of arrays (JAX's, NumPy's) and other types are left to
mypy.
"""

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxtyping

ROOT = Path(__file__).parents[2]

EXPRESSION = re.compile(r"\S*\w[-+*/]\S*")
"""An axis that is computed from others, such as "2*inter"."""

UNCHECKED = (
    # Triton compiles a kernel's source with the names of its module; a decorated kernel has jaxtyping's.
    "moe_jax.kernels.experts.triton.by_experts",
    "moe_jax.kernels.experts.triton.by_rows",
)
"""Modules that are not checked, and why."""


def install() -> None:
    """Decorates the functions of all modules that have jaxtyping's annotations, except in `UNCHECKED`, from now on."""
    finder = jaxtyping.install_import_hook("moe_jax", "tests.helpers.shapes.check").hook
    finder.should_instrument = is_checked


def is_checked(module: str) -> bool:
    """Returns whether a module's functions are decorated.

    A decorated call takes 15 us more. The millions of calls in `moe_jax.cost`, which has no annotated arrays, would feel it.
    """
    if module.partition(".")[0] != "moe_jax" or module in UNCHECKED:
        return False
    place = ROOT.joinpath(*module.split("."))
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return "jaxtyping" in source.read_text()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Takes all arrays as they are, for tests of what a function does with arrays that its annotations exclude."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def check(function):
    """Decorates a function so that its arguments and its result are compared with their annotations once it has returned.

    A call that raises an error of its own is not compared: tests of errors may pass any shape. An axis like "2*inter" may have
    any size if no array of the call has an axis `inter`.

    Raises:
        TypeError: by the decorated function, if an array has another shape or dtype than its annotation.
    """
    hints = {name: hint for name, hint in function.__annotations__.items() if has_arrays(hint)}
    # jaxtyping decorates two copies of each function. The one for the time before the call returns Any; the other is given
    # the result. JAX builds dataclasses anew around stacked layers, gradients of integers and placeholders.
    if not hints or function.__annotations__.get("return") is typing.Any or function.__name__ == "__init__":
        return function
    signature = inspect.signature(function)
    bind = binder(signature)
    for name in hints.keys() & signature.parameters.keys():
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            hints[name] = tuple[hints[name], ...]
    # Shapes with expressions come last: the axes of an expression may belong to any array of the call.
    passes = [(hints, False), ({name: hint for name, hint in hints.items() if has_expressions(hint)}, True)]

    @functools.wraps(function)
    def checked(*arguments, **options):
        result = function(*arguments, **options)
        values = bind(arguments, options) | {"return": result}
        for some, with_expressions in passes:
            for name, hint in some.items():
                if name in values:
                    require(name, values[name], hint, with_expressions)
        return result

    return checked


def binder(signature: inspect.Signature):
    """Returns a function from a call's arguments and options to {parameter: value}.

    `Signature.bind` takes longer than the comparison. A call that has returned fits the signature, so names suffice where no
    parameter collects several.
    """
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return lambda arguments, options: signature.bind(*arguments, **options).arguments
    names = tuple(signature.parameters)
    return lambda arguments, options: dict(zip(names, arguments, strict=False)) | options


def has_arrays(hint) -> bool:
    """Returns whether an annotation is an array's, or a union or tuple that has one."""
    return is_array(hint) or any(map(has_arrays, typing.get_args(hint)))


def has_expressions(hint) -> bool:
    """Returns whether an annotation has an axis that is computed from others."""
    return bool(EXPRESSION.search(hint.dim_str)) if is_array(hint) else any(map(has_expressions, typing.get_args(hint)))


def is_array(hint) -> bool:
    """Returns whether an annotation is one of jaxtyping's."""
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def require(name: str, value, hint, with_expressions: bool) -> None:
    """Raises TypeError if arrays do not have the annotated shapes and dtypes."""
    if not fits(value, hint, with_expressions):
        parts = value if isinstance(value, tuple) else (value,)
        found = [f"{part.dtype}{list(part.shape)}" if has_shape(part) else type(part).__name__ for part in parts]
        raise TypeError(f"{name} is {', '.join(found)}; its annotation is {hint}")


def fits(value, hint, with_expressions: bool) -> bool:
    """Returns whether the arrays in a value have the annotated shapes and dtypes."""
    if is_array(hint):
        return not has_shape(value) or has_axes(value, hint, with_expressions)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and (has_shape(value) or isinstance(value, tuple)):
        return any(fits(value, part, with_expressions) if has_arrays(part) else is_of(value, part) for part in parts)
    if origin is tuple and isinstance(value, tuple):
        if ... in parts:
            parts = parts[:1] * len(value)
        return len(parts) == len(value) and all(map(functools.partial(fits, with_expressions=with_expressions), value, parts))
    return True


def has_shape(value) -> bool:
    """Returns whether a value is an array. A gradient for an array of integers is none: its dtype is float0."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and value.dtype != jax.dtypes.float0


def is_of(value, hint) -> bool:
    """Returns whether a value belongs to an annotation without shapes."""
    kind = typing.get_origin(hint) or hint
    return kind is typing.Any or isinstance(kind, type) and isinstance(value, kind)


def has_axes(value, hint, with_expressions: bool) -> bool:
    """Returns whether an array has the dtype and the axes of an annotation; names keep their sizes within a call."""
    axes = hint.dim_str if with_expressions else EXPRESSION.sub("_", hint.dim_str)
    try:
        return isinstance(value, of_any_kind(hint.dtype, axes))
    except jaxtyping.AnnotationError:
        return True


@functools.cache
def of_any_kind(dtype, axes: str):
    """Returns the annotation of JAX's and NumPy's arrays alike, and of tracers and references."""
    return dtype[typing.Any, axes]
