"""Timing of a JAX call."""

import statistics
import time

import jax


def median_ms(f, arguments: tuple, launches: int) -> float:
    """Returns the milliseconds of a call: the median of 5 groups of `launches` calls between two synchronisations."""
    for _ in range(3):
        jax.block_until_ready(f(*arguments))
    groups = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(launches):
            result = f(*arguments)
        jax.block_until_ready(result)
        groups.append((time.perf_counter() - began) / launches)
    return 1e3 * statistics.median(groups)
