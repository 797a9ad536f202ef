"""h in 8 bits between the passes: its errors compared with e4m3, zeros and infinities."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_jax.kernels.experts.fp8.quantise import dequantised_rows, e3m4_codes, keep_h, of_e3m4_codes, quantise_rows, read_h
from tests.helpers import seeds


def test_half_the_error_in_the_same_bytes():
    """Also in groups with an outlier."""
    h = jnp.asarray(seeds.rng().normal(size=(64, 256)), jnp.bfloat16).at[::2, 5].set(50)
    kept, other = keep_h(h, "fp8"), quantise_rows(h)
    assert [a.nbytes for a in kept] == [a.nbytes for a in other]
    exact, alike = np.asarray(h, np.float64), read_h(kept)
    assert alike.dtype == jnp.bfloat16 and keep_h(h, "bf16") is h and read_h(h) is h
    for rows, part in ((slice(1, None, 2), 0.6), (slice(0, None, 2), 0.9)):
        errors = [np.linalg.norm((np.asarray(a, np.float64) - exact)[rows]) for a in (alike, dequantised_rows(other))]
        assert errors[0] < part * errors[1]
    np.testing.assert_allclose(np.asarray(alike, np.float64), exact, rtol=2**-5 + 2**-8, atol=50 / 992)


def test_extremes():
    """Groups of zeros are zeros, and an infinity or a NaN makes its own group NaN, largest numbers none."""
    h = jnp.zeros((4, 256), jnp.bfloat16).at[1].set(3e38).at[2, 0].set(jnp.inf).at[3, 200].set(jnp.nan)
    found = np.asarray(read_h(keep_h(h, "fp8")), np.float32)
    assert not found[0].any() and np.isfinite(found[1]).all() and found[1].min() > 2.9e38
    assert np.isnan(found[2, 0]) and np.isnan(found[3, 128:]).all() and not found[2:, :128][1].any()


def test_codes_are_those_of_the_type():
    """All codes, the numbers at equal distance of two, their neighbours in f32, and random ones; NaN stays NaN."""
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes.view(ml_dtypes.float8_e3m4).astype(np.float32)
    finite = np.unique(numbers[np.isfinite(numbers)])
    halfway = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    values = np.concatenate([finite, halfway, *near, seeds.rng().normal(size=5000).astype(np.float32) * 4, [-0.0, np.nan]])
    values = values.clip(-15.5, 15.5).astype(np.float32)
    found = np.asarray(jax.jit(e3m4_codes)(values)).view(ml_dtypes.float8_e3m4)
    np.testing.assert_array_equal(found.astype(np.float32), values.astype(ml_dtypes.float8_e3m4).astype(np.float32))
    assert np.array_equal(np.signbit(found[:-1]), np.signbit(values[:-1]))
    finite_codes = codes[codes & 0x7F != 0x70]
    read = np.asarray(jax.jit(of_e3m4_codes)(finite_codes))
    np.testing.assert_array_equal(read, finite_codes.view(ml_dtypes.float8_e3m4).astype(np.float32))
