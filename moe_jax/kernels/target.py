"""The device that kernels are compiled for: an absent GPU if the abstract mesh names one, else a device of this process."""

import jax


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
