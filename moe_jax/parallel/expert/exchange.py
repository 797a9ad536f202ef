"""`dispatch` brings tokens to the devices that hold their experts, `combine` brings outputs home and sums them.

Each is the transpose of the other (as in DeepEP, https://github.com/deepseek-ai/DeepEP): the gradient of dispatch is combine,
that of combine is dispatch, whatever the transport. A token travels to a device once, however many of its experts live there.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from moe_jax.parallel.expert import all_to_all, gather, pairwise, ragged
from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.settings import Transport


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch(
    x: Float[Array, "tokens features"], route: Route, axis_name: str, transport: Transport, steps: tuple[int, ...] = ()
) -> Float[Array, "received features"]:
    """The tokens that the devices of the axis send to this one, C slots of each; rows that nobody sent are zero.

    With "gather" C is the number of tokens and every token is sent, as with "pairwise" if C is that number; else C is that of
    `route`. Rows stand in the order of the devices; with "pairwise" this device's own come first, then those of the device
    before it, and so on.

    Args:
        steps: with "pairwise", how many devices' rows are computed together, in this order; `combine` sends them home so.
    """
    return MODULES[transport].to_experts(x, route, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def combine(
    rows: Float[Array, "received features"], route: Route, axis_name: str, transport: Transport, steps: tuple[int, ...] = ()
) -> Float[Array, "tokens features"]:
    """Sends each row back to where `dispatch` took it from; a token's rows are summed there.

    Rows travel in their dtype. They are summed in the order of the devices or, where "pairwise" sends every token, as they
    stand, in at least f32, and so is the result.
    """
    if transport == "pairwise":
        return pairwise.to_home(rows, route, axis_name, steps)
    return MODULES[transport].to_home(rows, route, axis_name)


MODULES = {"gather": gather, "all_to_all": all_to_all, "ragged": ragged, "pairwise": pairwise}


def _dispatch_forward(x, route, *how):
    return dispatch(x, route, *how), route


def _dispatch_backward(*arguments):
    *how, route, d_rows = arguments
    return combine(d_rows, route, *how).astype(d_rows.dtype), None


def _combine_forward(rows, route, *how):
    return combine(rows, route, *how), (route, jax.numpy.zeros((), rows.dtype))


def _combine_backward(*arguments):
    *how, (route, like), d_sums = arguments
    return dispatch(d_sums.astype(like.dtype), route, *how), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)
