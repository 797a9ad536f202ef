"""Random numbers of tests. They differ from run to run; a test that fails prints the seed that repeats them."""

import os
import secrets
import zlib

import numpy as np

SEED = int(os.environ.setdefault("MOE_JAX_SEED", str(secrets.randbits(32))))
"""Seed of the whole run. Its worker processes and the processes that tests start find it in their environment."""

_calls: dict[str, int] = {}
"""Calls of `rng` so far, by test and phase."""


def rng(name: str | None = None) -> np.random.Generator:
    """Returns a generator of this run's seed, the running test, and the number of earlier calls in that test.

    Fixtures and caches that several tests share pass a `name` instead: which test calls first depends on the order.
    """
    if name is not None:
        return np.random.default_rng([SEED, zlib.crc32(name.encode())])
    test = os.environ["PYTEST_CURRENT_TEST"]
    _calls[test] = _calls.get(test, 0) + 1
    return np.random.default_rng([SEED, zlib.crc32(test.encode()), _calls[test]])


def integer(name: str | None = None) -> int:
    """Returns a random seed for another library, from 0 to 2**31 - 1."""
    return int(rng(name).integers(2**31))
