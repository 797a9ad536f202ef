"""Chooses the implementation of the grouped matmuls: the user's choice, or the fastest that fits."""

import functools
import logging
import os

import jax
import jax.numpy as jnp

from moe_jax.kernels.experts.backends import BACKENDS, implementation
from moe_jax.kernels.target import compute_capability

ENVIRONMENT_VARIABLE = "MOE_JAX_BACKEND"

_logger = logging.getLogger(__name__)


def resolve_backend(name: str | None, dtype: jnp.dtype, hidden: int, inter: int, row_alignment: int | None = None) -> str:
    """Returns the backend to use: `name` if given, else the environment variable MOE_JAX_BACKEND, else the first that fits.

    A backend fits if three conditions hold. It was written for the target. It takes experts of `dtype`, `hidden` and `inter`.
    The plan has the `row_alignment` that it needs (None: the plan is made for it). The choice, and why earlier backends
    were passed over, is logged once.

    Raises:
        ValueError: the name is not in BACKENDS, or the named backend does not take the input.
    """
    source = "argument backend"
    if name is None and ENVIRONMENT_VARIABLE in os.environ:
        name, source = os.environ[ENVIRONMENT_VARIABLE], f"environment variable {ENVIRONMENT_VARIABLE}"
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(map(repr, BACKENDS))}")
        reason = _refusal(name, dtype, hidden, inter, row_alignment)
        if reason is not None:
            raise ValueError(f"{source}: backend {name!r} does not take this input: {reason}")
        _announce(name, ())
        return name
    reasons: list[str] = []
    for candidate in BACKENDS:
        reason = _reason_against(candidate, dtype) or _refusal(candidate, dtype, hidden, inter, row_alignment)
        if reason is None:
            _announce(candidate, tuple(reasons))
            return candidate
        reasons.append(f"{candidate!r} not: {reason}")
    raise AssertionError("the last backend takes everything")


def is_mosaic_allowed() -> bool:
    """Returns False if the environment variable MOE_JAX_BACKEND names another backend than "mosaic"."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "mosaic") == "mosaic"


def is_named(name: str | None) -> bool:
    """Returns True if the user chose the backend that `resolve_backend` returns for this name."""
    return name is not None or ENVIRONMENT_VARIABLE in os.environ


def _refusal(name: str, dtype: jnp.dtype, hidden: int, inter: int, row_alignment: int | None) -> str | None:
    needed = implementation(name).ROW_ALIGNMENT
    if row_alignment is not None and row_alignment % needed:
        return f"the plan has row_alignment {row_alignment}; it needs plan(..., row_alignment={needed})"
    return implementation(name).refusal(dtype, hidden, inter)


def _reason_against(name: str, dtype: jnp.dtype) -> str | None:
    """Returns why a backend that could run is not taken by default; None if it is."""
    if name == "xla":
        return None
    if name == "triton" and dtype == jnp.float32:
        return "in f32 'xla' is faster"
    # Asking the module itself would import Pallas Mosaic GPU on every device.
    is_native = compute_capability() == "9.0" if name == "mosaic" else implementation(name).is_native()
    if not is_native:
        return "it is not written for this device"
    return splitting_refusal()


def splitting_refusal() -> str | None:
    """Returns why a kernel of ours is not taken by default: the compiler might have to split it. None if it need not."""
    mesh = jax.sharding.get_abstract_mesh()
    is_split = not mesh.manual_axes or any(size > 1 for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    if jax.device_count() > 1 and is_split:
        return "the compiler cannot split it over several devices; call it inside shard_map, or name it"
    return None


@functools.cache
def _announce(name: str, reasons: tuple[str, ...]) -> None:
    """Logs each choice once a process."""
    _logger.info("MoE experts run on backend %r%s", name, "".join(f"; {reason}" for reason in reasons))
