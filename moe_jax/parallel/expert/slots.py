"""Tokens into the slots of a buffer and back: each the transpose of the other, and both are gathers, so nothing is atomic."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from moe_jax.kernels.precision import at_least_f32
from moe_jax.parallel.expert.routes import Route


def pack(x: Num[Array, "tokens features"], route: Route) -> Num[Array, "devices slots features"]:
    """out[d, c] = x[token_of_slot[d, c]]; zeros in empty slots."""
    return x.at[route.token_of_slot].get(mode="fill", fill_value=0)


def unpack(slots: Float[Array, "devices slots features"], route: Route) -> Float[Array, "tokens features"]:
    """out[t] = sum over d of the token's slot for d, in at least f32 and in the order of the devices."""
    flat = slots.reshape(-1, slots.shape[2])
    of_devices = flat.at[route.slot_of_token].get(mode="fill", fill_value=0)
    return jnp.sum(of_devices, axis=0, dtype=at_least_f32(slots.dtype))
