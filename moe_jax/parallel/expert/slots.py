"""Packs tokens into the slots of a buffer, and sums them back.

`pack` and `unpack` are each other's transpose. Both are gathers, so no addition is atomic and results are deterministic.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from moe_jax.kernels.precision import at_least_f32
from moe_jax.parallel.expert.routes import Route


def pack(x: Num[Array, "tokens features"], route: Route) -> Num[Array, "devices slots features"]:
    """Returns out[d, c] = x[token_of_slot[d, c]]; empty slots are zero."""
    return x.at[route.token_of_slot].get(mode="fill", fill_value=0)


def unpack(slots: Float[Array, "devices slots features"], route: Route) -> Float[Array, "tokens features"]:
    """Returns out[t], the sum of the slots of token t for all devices, in at least f32 and in the order of the devices."""
    flat = slots.reshape(-1, slots.shape[2])
    of_devices = flat.at[route.slot_of_token].get(mode="fill", fill_value=0)
    return jnp.sum(of_devices, axis=0, dtype=at_least_f32(slots.dtype))
