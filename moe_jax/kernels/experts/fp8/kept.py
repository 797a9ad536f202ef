"""h = [gate | up] between the two passes, in bf16 or in 8 bits.

No tensor core multiplies what is kept, so that its 8 bits need not be e4m3. e3m4 has one bit more behind the point, and numbers
down to 1/992 of a group's largest: half the error, in the same bytes.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Shaped

from moe_jax.kernels.experts.fp8.precision import Kept
from moe_jax.kernels.experts.fp8.quantise import GROUP, LEAST_MAXIMUM

INVERSE_LARGEST = np.float32(1 / 15.5)
"""One over the largest number of e3m4."""


class KeptRows(NamedTuple):
    """Rows in e3m4: h[r, i] is about values[r, i] * scales[r, i // 128]."""

    values: Shaped[Array, "rows k"]
    scales: Float[Array, "rows k/128"]


def keep_h(h: BFloat16[Array, "rows k"], form: Kept) -> BFloat16[Array, "rows k"] | KeptRows:
    """Returns h for the backward pass: as it is, or in 8 bits with a scale for 128 numbers of a row."""
    if form == "bf16":
        return h
    groups = h.astype(jnp.float32).reshape(h.shape[0], h.shape[1] // GROUP, GROUP)
    scales = jnp.maximum(jnp.abs(groups).max(axis=-1), LEAST_MAXIMUM) * INVERSE_LARGEST
    values = (groups * (1 / scales)[..., None]).astype(jnp.float8_e3m4)
    # XLA on a GPU would remove both conversions where one program has both passes, and keep h as it is.
    return lax.optimization_barrier(KeptRows(values.reshape(h.shape), scales))


def read_h(kept: Float[Array, "rows k"] | KeptRows) -> Float[Array, "rows k"]:
    """Returns h, in bf16 if it was kept in 8 bits."""
    if not isinstance(kept, KeptRows):
        return kept
    return (kept.values.astype(jnp.float32) * jnp.repeat(kept.scales, GROUP, axis=1)).astype(jnp.bfloat16)
