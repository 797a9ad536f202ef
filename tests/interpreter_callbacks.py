"""Makes the callbacks of JAX's GPU interpreter cheaper: they get NumPy arrays and numbers.

A kernel in the interpreter calls Python thousands of times. JAX puts each argument of `io_callback` on a device first, and the
interpreter reads it back at once: a third of the time of a kernel's test.
"""

import numpy as np
from jax._src import callback as callbacks


def install() -> None:
    """Replaces JAX's implementation of `io_callback` in this process. The package itself has no callbacks."""
    callbacks.io_callback_impl = call


def call(*arguments, result_avals, callback, sharding, ordered) -> list[np.ndarray]:
    """Returns the results of a callback for arguments that XLA lends as NumPy arrays."""
    del result_avals, sharding, ordered
    return [np.asarray(result) for result in callback(*map(own, arguments))]


def own(x: np.ndarray) -> np.ndarray | np.generic | int:
    """Returns a copy, which the interpreter may keep. It requires indices as integers of Python."""
    if x.ndim:
        return np.array(x)
    return x.item() if x.dtype == np.int32 else x[()]
