"""Fresh random numbers for the kernel tests; a failure prints the seed that repeats it."""

import secrets

import numpy as np
import pytest


@pytest.fixture
def rng(record_property) -> np.random.Generator:
    seed = secrets.randbits(32)
    record_property("seed", seed)
    print(f"numpy seed {seed}")
    return np.random.default_rng(seed)
