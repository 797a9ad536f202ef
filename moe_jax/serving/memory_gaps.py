"""Gaps in a GPU's memory for an engine's small arrays, which would else take a place that its steps need.

A step's temporaries are allocated anew in each step, where the last step's were. Between two steps small arrays may take a
piece of that place. Then XLA changes an address in each kernel of the step's CUDA graph. For 540 kernels that takes the host
1.2 to 2.3 ms. XLA's default allocator gives an array the smallest free place that the array fits, so gaps are taken first.
"""

import jax
import numpy as np
from jax import Array

GAP_BYTES = tuple(256 << i for i in range(9))
"""256 bytes to 64 KiB. XLA's allocator rounds sizes up to multiples of 256 bytes."""

GAPS_OF_A_SIZE = 24
"""More than the arrays of a size that steps in flight have."""


def leave_gaps(device: jax.Device) -> list[Array]:
    """Returns small arrays of a GPU with gaps between them, and none of another device. The gaps last as long as the arrays do.

    Arrays that the process makes later and keeps may fill them.
    """
    if device.platform != "gpu":
        return []
    gaps: list[Array] = []
    borders: list[Array] = []
    for num_bytes in GAP_BYTES:
        for _ in range(GAPS_OF_A_SIZE):
            # A border has its gap's size. A smaller one might lie in a hole elsewhere, and two gaps would be one.
            for arrays in (gaps, borders):
                arrays.append(jax.device_put(np.zeros(num_bytes, np.uint8), device))
    # All must be there before the first gap is freed.
    jax.block_until_ready((gaps, borders))
    return borders
