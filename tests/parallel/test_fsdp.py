"""Refusals of layouts. `eight_devices/test_fsdp.py` computes with the others."""

import jax.numpy as jnp
import pytest
import tiny
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from moe_jax.parallel import ShardedParameters


def test_experts_that_do_not_divide():
    mesh = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    params = nnx.state(tiny.model(), nnx.Param)
    with pytest.raises(ValueError, match="4 experts cannot be dealt out to expert=8 devices; take a divisor"):
        ShardedParameters.of(params, mesh, dtype=jnp.float32, token_axes=("expert",))
