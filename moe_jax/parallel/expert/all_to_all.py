"""Transport `all_to_all`: a buffer of C slots from each device to each other (GShard, https://arxiv.org/abs/2006.16668).

The routing fills a part of each buffer. For tokens of D elements, (n-1)*C*D elements leave and enter each device.
"""

import jax
from jaxtyping import Array, Float, Num

from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import pack, unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """Returns the tokens that the devices sent here, in C slots a device and the devices' order; empty slots are zero."""
    return jax.lax.all_to_all(pack(x, route), axis_name, 0, 0).reshape(-1, x.shape[1])


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Returns each token's sum over the slots in which it travelled, in at least f32."""
    slots = rows.reshape(*route.token_of_slot.shape, rows.shape[1])
    return unpack(jax.lax.all_to_all(slots, axis_name, 0, 0), route)
