"""A process that interprets Triton kernels, for the tests of both precisions."""

import importlib.metadata
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from moe_jax.kernels.experts import triton
from moe_jax.kernels.experts.triton import launch
from tests.helpers.triton_without_gpu import interpret_from_now_on, interpreted_call, pretend_hopper


@pytest.fixture(scope="session")
def interpreter():
    """A process of its own: Triton decides at its import whether kernels are interpreted."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpret_from_now_on) as executor:
        yield executor


@pytest.fixture
def runs(monkeypatch, request):
    """Lets the backend run here: as it is on an NVIDIA GPU, elsewhere as on Hopper with every kernel interpreted."""
    if not triton.is_native():
        if importlib.metadata.version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
            pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.5")
        executor = request.getfixturevalue("interpreter")
        pretend_hopper(monkeypatch)
        monkeypatch.setattr(launch, "triton_call", lambda: lambda *args, **kwargs: interpreted_call(executor, *args, **kwargs))
