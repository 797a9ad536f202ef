"""The interpreter's shims: the race detector's switch, and what a GPU does not need."""

import jax
import jax.numpy as jnp
import pytest
from lowered import H200

from moe_jax.kernels.hopper import interpreter
from moe_jax.kernels.hopper.interpreter import interpret, is_interpreted, operand_staging
from moe_jax.kernels.hopper.launch import grid_size
from moe_jax.kernels.hopper.target import compute_capability


@pytest.mark.skipif(not is_interpreted(), reason="the kernels run on this GPU")
def test_race_detector(monkeypatch):
    """On by default, off by argument or for a whole test."""
    assert interpret().detect_races
    assert not interpret(detect_races=False).detect_races
    monkeypatch.setattr(interpreter, "DETECT_RACES", False)
    assert not interpret().detect_races and interpret(detect_races=True).detect_races


def test_an_h200_is_not_interpreted():
    """Also where the program is lowered on a machine without a GPU."""
    with jax.sharding.use_abstract_mesh(H200):
        assert not is_interpreted() and interpret() is False
        assert operand_staging((64, 64), jnp.dtype(jnp.bfloat16)) is None
        assert (compute_capability(), grid_size(), grid_size(1)) == ("9.0", 264, 132)
