"""Engines that compile a program when a step first needs it: a test needs few of those that a server compiles beforehand."""

import contextlib
from functools import partial

import jax
import pytest

from moe_jax.serving import device


class Programs(dict):
    """The program of each shape that was asked for."""

    def __init__(self, make, served, weights_tree, weights, state, shapes):
        super().__init__()
        # The state's arrays are given away by the first step.
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), state)
        self._make = lambda shape: make(served, weights_tree, weights, like, [shape])[shape]

    def __missing__(self, shape):
        self[shape] = self._make(shape)
        return self[shape]


@contextlib.contextmanager
def compiled_lazily():
    """Engines that are made in this context compile so."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step_programs", "module_programs"):
            patch.setattr(device, name, partial(Programs, getattr(device, name)))
        patch.setattr(device.Device, "warm_up", lambda self: None)
        yield
