"""bf16 parameters and low halves are f32 masters, bit for bit, and nothing of an update is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.train.master_weights import initial_low_halves, join, split
from tests.helpers import seeds


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_split_and_join_are_inverse(values):
    masters = {"w": jnp.asarray(values, jnp.float32)}
    params, low = split(masters)
    assert (params["w"].dtype, low["w"].dtype) == (jnp.bfloat16, jnp.int16)
    np.testing.assert_array_equal(join(params, low)["w"].view(jnp.int32), masters["w"].view(jnp.int32))


def test_the_parameter_is_the_nearest_bf16():
    master = jax.random.normal(jax.random.key(seeds.integer()), (10000,))
    halfway = (master.view(jnp.int32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(split(master)[0][~halfway], master.astype(jnp.bfloat16)[~halfway])


def test_a_nan_stays_one():
    bits = np.asarray([0x7FC00000, 0x7F800001, 0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF], np.uint32)
    params, low = split(jnp.asarray(bits.view(np.float32)))
    assert jnp.isnan(params).all() and jnp.isnan(join(params, low)).all()


def test_masters_begin_as_their_parameters():
    params = {"w": jnp.asarray([1.5, -2.0], jnp.bfloat16)}
    np.testing.assert_array_equal(join(params, initial_low_halves(params))["w"], params["w"].astype(jnp.float32))
    assert initial_low_halves({"w": jnp.zeros(2)}) is None


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float32", "bfloat16")])
def test_other_dtypes_are_refused(dtypes):
    with pytest.raises(ValueError, match="parameters must be all float32 or all bfloat16 .* float"):
        initial_low_halves({name: jnp.zeros(2, dtype) for name, dtype in zip("ab", dtypes, strict=True)})


def test_updates_far_below_bf16s_steps_add_up():
    params, low = jnp.ones(3, jnp.bfloat16), jnp.zeros(3, jnp.int16)
    for _ in range(1000):
        params, low = split(join(params, low) + 1e-5)
    np.testing.assert_allclose(params.astype(jnp.float32), 1.01, rtol=2**-8)
    np.testing.assert_allclose(join(params, low), 1.01, rtol=1e-4)
