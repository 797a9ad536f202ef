"""Transport `gather`: every device receives all tokens of the axis, and computes the tokens that chose its experts.

It is an all-gather and a `sum_scatter`. (n-1)*T*D elements enter and leave each device under any routing.
"""

import jax
from jaxtyping import Array, Float, Num

from moe_jax.parallel.collectives.sums import sum_scatter
from moe_jax.parallel.expert.routes import Route


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """Returns all devices' tokens in the devices' order; the route is not used."""
    return jax.lax.all_gather(x, axis_name, tiled=True)


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Returns each token's sum over the devices, in at least f32."""
    return sum_scatter(rows, axis_name, 0)
