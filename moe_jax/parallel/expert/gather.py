"""Transport `gather`: every device receives all tokens of the axis and computes those that chose its experts.

(n-1)*T*D elements in and as many out a device, whatever the routing: an all-gather, and a `sum_scatter`.
"""

import jax
from jaxtyping import Array, Float, Num

from moe_jax.parallel.collectives.sums import sum_scatter
from moe_jax.parallel.expert.routes import Route


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """All devices' tokens, in the devices' order; the route is not needed."""
    return jax.lax.all_gather(x, axis_name, tiled=True)


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Each token's sum over the devices."""
    return sum_scatter(rows, axis_name, 0)
