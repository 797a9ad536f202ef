"""What the kernels need to know of the machine that they are compiled for."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETED_CORES = 2
"""Blocks in the interpreter: enough for two to run at once and for each to take several tiles."""


def num_cores() -> int:
    """Streaming multiprocessors of the target: as many persistent blocks run."""
    if is_interpreted():
        return INTERPRETED_CORES
    target = jax.sharding.get_abstract_mesh().abstract_device
    return target.num_cores if target is not None else jax.devices()[0].core_count


def is_interpreted() -> bool:
    """Whether JAX's GPU interpreter runs the kernels: where the target is a CPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return (target.platform if target is not None else jax.default_backend()) == "cpu"


def interpret() -> plgpu.InterpretGPUParams | bool:
    """The `interpret` argument of a kernel; interpreted kernels are checked for races."""
    return plgpu.InterpretGPUParams(detect_races=True) if is_interpreted() else False


def compute_capability() -> str | None:
    """ "9.0" for Hopper; None where the target is no NVIDIA GPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return "9.0" if "H100" in target.device_kind or "H200" in target.device_kind else None
    return getattr(jax.devices()[0], "compute_capability", None)
