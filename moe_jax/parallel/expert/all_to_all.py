"""Transport `all_to_all`: buffers of a fixed number of slots from each device to each, filled as far as the routing needs
(GShard, https://arxiv.org/abs/2006.16668). (n-1)*C*D elements out and in a device, C slots for each other device.
"""

import jax
from jaxtyping import Array, Float, Num

from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import pack, unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """The tokens that the devices sent here, C slots of each, in the devices' order; zeros in empty slots."""
    return jax.lax.all_to_all(pack(x, route), axis_name, 0, 0).reshape(-1, x.shape[1])


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Each token's sum over the slots in which it travelled."""
    slots = rows.reshape(*route.token_of_slot.shape, rows.shape[1])
    return unpack(jax.lax.all_to_all(slots, axis_name, 0, 0), route)
