"""Sends tokens to the devices that hold their experts (`dispatch`), and sends outputs home and sums them (`combine`).

Each is the transpose of the other (as in DeepEP, https://github.com/deepseek-ai/DeepEP). The gradient of dispatch is combine,
and the gradient of combine is dispatch, with any transport. A token travels to a device once, even if it chose several experts
there.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from moe_jax.parallel.expert import all_to_all, gather, pairwise
from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.settings import Transport, TransportName


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch(
    x: Float[Array, "tokens features"],
    route: Route,
    axis_name: str,
    transport: TransportName | Transport,
    steps: tuple[int, ...] = (),
) -> Float[Array, "received features"]:
    """Returns the tokens that the devices of the axis send to this one, in C slots a device; empty slots are zero.

    With "gather" C is the number of tokens, and every token is sent. "pairwise" does the same if `route` has C slots for C
    tokens. Otherwise C is the number of slots of `route`. Rows stand in the order of the devices. With "pairwise" this
    device's own rows come first, then the rows of the device before it, and so on.

    Args:
        steps: with "pairwise", the number of devices whose rows each step computes, in order. `combine` sends them home so.
    """
    return functions_of(transport).to_experts(x, route, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def combine(
    rows: Float[Array, "received features"],
    route: Route,
    axis_name: str,
    transport: TransportName | Transport,
    steps: tuple[int, ...] = (),
) -> Float[Array, "tokens features"]:
    """Sends each row back to the device that `dispatch` took it from, and sums the rows of each token there.

    Rows travel in their dtype. The sum and the result are in at least f32. The order of summation is the order of the devices;
    if "pairwise" sends every token, it is the order of the rows.
    """
    if transport == "pairwise":
        return pairwise.to_home(rows, route, axis_name, steps)
    return functions_of(transport).to_home(rows, route, axis_name)


_BUILT_IN = {
    "gather": Transport("gather", gather.to_experts, gather.to_home),
    "all_to_all": Transport("all_to_all", all_to_all.to_experts, all_to_all.to_home),
    "pairwise": Transport("pairwise", pairwise.to_experts, pairwise.to_home),
}


def functions_of(transport: TransportName | Transport) -> Transport:
    """Returns the functions of a transport."""
    return transport if isinstance(transport, Transport) else _BUILT_IN[transport]


def _dispatch_forward(x, route, axis_name, transport, steps):
    return dispatch(x, route, axis_name, transport, steps), route


def _dispatch_backward(axis_name, transport, steps, route, d_rows):
    return combine(d_rows, route, axis_name, transport, steps).astype(d_rows.dtype), None


def _combine_forward(rows, route, axis_name, transport, steps):
    return combine(rows, route, axis_name, transport, steps), (route, jax.numpy.zeros((), rows.dtype))


def _combine_backward(axis_name, transport, steps, residuals, d_sums):
    route, like = residuals
    return dispatch(d_sums.astype(like.dtype), route, axis_name, transport, steps), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)
