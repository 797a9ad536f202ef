"""Tests over meshes of up to 8 devices, which a process has if all its files are in this folder (tests/conftest.py)."""

import jax
import pytest

collect_ignore_glob = [] if jax.device_count() >= 8 else ["test_*.py"]


@pytest.fixture
def interpreted_on_several(monkeypatch):
    """Lets JAX's GPU interpreter run a kernel on several devices at once.

    The first device that finishes a kernel checks that no barrier of any device is left, but others still run it.
    """
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory  # imports Pallas Mosaic GPU

    monkeypatch.setattr(GPUSharedMemory, "assert_no_barriers_allocated", lambda memory: None)
