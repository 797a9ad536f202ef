"""What every test runs under."""

import os

# JAX's GPU interpreter waits for barriers inside callbacks, which hold a thread of XLA's CPU pool each: six in a kernel of two
# blocks. With a pool of two, as a machine of two cores has, the warpgroup that they wait for may never run.
os.environ.setdefault("NPROC", "16")

import cpu_flags

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", cpu_flags.UNOPTIMISED)

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Tests compare f32 with f32 and f64; on an NVIDIA GPU XLA multiplies f32 matrices in TF32 unless told otherwise.
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def no_races():
    """The race detector of JAX's GPU interpreter found nothing in the kernels that a test ran."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield
    if gpu_callbacks._races is not None:
        assert not gpu_callbacks.get_races().races_found
