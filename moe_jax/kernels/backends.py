"""The device that kernels are compiled for, and the choice among the backends of the experts.

The device is an absent GPU if the abstract mesh names one, else a device of this process. A backend multiplies rows sorted by
expert with each expert's own weights. Every backend module offers the same names, which `experts.xla` describes:

- `grouped_matmul`, `grouped_outer` and `grouped_outer_of_parts`;
- their fusions with the gated activation, `gated_matmul` and `gated_matmul_backward`;
- `rows_of_tokens` before these, and `token_sums` after them;
- `refusal`, `is_native` and `ROW_ALIGNMENT`.
"""

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import jax
import jax.numpy as jnp

from moe_jax.kernels.shapes import EXPERT_NAMES

BACKENDS = ("mosaic", "triton", "xla")
"""Every backend, the fastest first: `mosaic` runs on Hopper GPUs, `triton` on NVIDIA GPUs from Ampere on, `xla` everywhere.
In f32 `xla` is before `triton`: on an H200 2.4 times as fast with exact products, 8 times with TF32's."""


@functools.cache
def implementation(backend: str) -> ModuleType:
    """Imports and returns a backend's module, on first use: Pallas Mosaic GPU takes a second to import."""
    return import_module(f"moe_jax.kernels.experts.{backend}")


ENVIRONMENT_VARIABLE = "MOE_JAX_BACKEND"

_logger = logging.getLogger(__name__)


def resolve_backend(
    name: str | None,
    dtype: jnp.dtype,
    hidden: int,
    inter: int,
    row_alignment: int | None = None,
    names: tuple[str, str, str] = EXPERT_NAMES,
) -> str:
    """Returns the backend to use: `name` if given, else the environment variable MOE_JAX_BACKEND, else the first that fits.

    A backend fits if it was written for the target, supports experts of `dtype`, `hidden` and `inter`, and the plan has its
    `row_alignment`. None: the plan is made for it. The choice, and the reasons against earlier backends, are logged once. Both
    call `dtype`'s array and the two sizes by `names`.

    Raises:
        ValueError: the name is not in BACKENDS, or the named backend does not support the input.
    """
    source = "argument backend"
    if name is None and ENVIRONMENT_VARIABLE in os.environ:
        name, source = os.environ[ENVIRONMENT_VARIABLE], f"environment variable {ENVIRONMENT_VARIABLE}"
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(map(repr, BACKENDS))}")
        reason = _refusal(name, dtype, hidden, inter, row_alignment, names)
        if reason is not None:
            raise ValueError(f"{source}: backend {name!r} does not support this input: {reason}")
        _announce(name, ())
        return name
    reasons: list[str] = []
    # The last backend supports everything.
    *candidates, chosen = BACKENDS
    for candidate in candidates:
        reason = _reason_against(candidate, dtype) or _refusal(candidate, dtype, hidden, inter, row_alignment, names)
        if reason is None:
            chosen = candidate
            break
        reasons.append(f"{candidate!r} not: {reason}")
    _announce(chosen, tuple(reasons))
    return chosen


def is_mosaic_allowed() -> bool:
    """Returns False if the environment variable MOE_JAX_BACKEND names another backend than "mosaic"."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "mosaic") == "mosaic"


def is_named(name: str | None) -> bool:
    """Returns True if the backend was chosen explicitly, by argument or environment variable."""
    return name is not None or ENVIRONMENT_VARIABLE in os.environ


def _refusal(
    name: str, dtype: jnp.dtype, hidden: int, inter: int, row_alignment: int | None, names: tuple[str, str, str]
) -> str | None:
    needed = implementation(name).ROW_ALIGNMENT
    if row_alignment is not None and row_alignment % needed:
        return f"the plan has row_alignment {row_alignment}; it needs plan(..., row_alignment={needed})"
    return implementation(name).refusal(dtype, hidden, inter, names)


def _reason_against(name: str, dtype: jnp.dtype) -> str | None:
    """Returns why a backend that could run is not used by default; None if it is."""
    if name == "triton" and dtype == jnp.float32:
        return "in f32 'xla' is faster"
    # Asking the module itself would import Pallas Mosaic GPU on every device.
    is_native = compute_capability() == "9.0" if name == "mosaic" else implementation(name).is_native()
    if not is_native:
        return "it is not written for this device"
    return splitting_refusal()


def splitting_refusal() -> str | None:
    """Returns why our kernels are not chosen by default: XLA cannot partition them over devices. None if it need not."""
    mesh = jax.sharding.get_abstract_mesh()
    is_split = not mesh.manual_axes or any(size > 1 for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    if jax.device_count() > 1 and is_split and not _is_on_one_device.value:
        return "the compiler cannot split it over several devices; call it inside shard_map, or name it"
    return None


_is_on_one_device = jax.make_user_context(False)


def on_one_device[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function for arrays on one device. Without it a process with several devices would choose no kernel."""

    def call(*args: P.args, **options: P.kwargs) -> R:
        with _is_on_one_device(True):
            return function(*args, **options)

    # JAX names programs after functions. A partial function has no name of its own.
    call.__name__ = getattr(getattr(function, "func", function), "__name__", "call")
    return call


@functools.cache
def _announce(name: str, reasons: tuple[str, ...]) -> None:
    """Logs each choice once a process."""
    _logger.info("MoE experts run on backend %r%s", name, "".join(f"; {reason}" for reason in reasons))


def platform() -> str:
    """Returns "gpu" or "cpu", among others."""
    target = _abstract_device()
    return (target if target is not None else _default_device()).platform


def is_interpreted() -> bool:
    """Returns True if kernels run in JAX's GPU interpreter, because the target is a CPU."""
    return platform() == "cpu"


def compute_capability() -> str | None:
    """Returns "9.0" for Hopper; None if the target is not an NVIDIA GPU."""
    target = _abstract_device()
    if target is not None:
        return "9.0" if "H100" in target.device_kind or "H200" in target.device_kind else None
    return getattr(_default_device(), "compute_capability", None)


def num_cores() -> int:
    """Returns the number of streaming multiprocessors (SMs) of the target GPU."""
    target = _abstract_device()
    return target.num_cores if target is not None else _default_device().core_count


def _abstract_device():
    return jax.sharding.get_abstract_mesh().abstract_device


def _default_device() -> jax.Device:
    """The device that `jax.default_device` names, else the first of this process."""
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen
