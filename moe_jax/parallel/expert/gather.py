"""Transport `gather`: every device receives all tokens of the axis and computes those that chose its experts.

(n-1)*T*D elements in and as many out a device, whatever the routing: an all-gather, and a reduce-scatter written as an
all-to-all with the sum at home, so that 16-bit partial outputs are summed in f32 and in the devices' order (a reduce-scatter of
the same bytes rounds after every addition).
"""

import jax
from jaxtyping import Array, Float, Num

from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import sum_over_devices


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """All devices' tokens, in the devices' order; the route is not needed."""
    return jax.lax.all_gather(x, axis_name, tiled=True)


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Each token's sum over the devices."""
    of_devices = jax.lax.all_to_all(rows.reshape(jax.lax.axis_size(axis_name), -1, rows.shape[1]), axis_name, 0, 0)
    return sum_over_devices(of_devices)
