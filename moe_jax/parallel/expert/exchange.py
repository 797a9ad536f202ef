"""Sends tokens to the devices that hold their experts (`dispatch`), and returns and sums outputs (`combine`).

Each is the transpose of the other (as in DeepEP, https://github.com/deepseek-ai/DeepEP). The gradient of dispatch is combine,
and the gradient of combine is dispatch, with any transport. A token travels to a device once, even if it chose several experts
there. For n devices and T tokens of D elements:

| transport | transfers | elements that enter and leave each device |
|---|---|---|
| gather | all tokens, by an all-gather and a `sum_scatter` | (n-1) T D, under any routing |
| all_to_all | a buffer of C slots for each device (GShard, https://arxiv.org/abs/2006.16668) | (n-1) C D |
| pairwise | the same, by a `ppermute` for each pair of devices (`pairwise`) | (n-1) C D |
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Num, UInt8

from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedRows, RoundedTokens, quantise_rows
from moe_jax.parallel.collectives.hops import sum_scatter
from moe_jax.parallel.expert import pairwise
from moe_jax.parallel.expert.routes import Route, pack, unpack
from moe_jax.parallel.expert.settings import Transport, TransportName


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch(
    x: Float[Array, "tokens features"],
    route: Route,
    axis_name: str,
    transport: TransportName | Transport,
    steps: tuple[int, ...] = (),
) -> Float[Array, "received features"]:
    """Sends tokens to the devices of their experts; returns the tokens received, C slots per sender. Empty slots are zero.

    With "gather" C is the number of tokens, and every token is sent. "pairwise" does the same if `route` has C slots for C
    tokens. Otherwise C is the number of slots of `route`. Rows are in device order. With "pairwise" this device's own rows come
    first, then the previous device's, and so on.

    Args:
        steps: with "pairwise", the number of devices whose rows each step computes, in order. `combine` returns them in the
            same steps.
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
    """Returns expert outputs to the devices that dispatched the tokens, and sums them per token there.

    Rows travel in their dtype. The sum and the result are in at least f32. The order of summation is device order; if
    "pairwise" sends every token, it is row order.
    """
    if transport == "pairwise":
        return pairwise.to_home(rows, route, axis_name, steps)
    return functions_of(transport).to_home(rows, route, axis_name)


def _all_tokens(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    return jax.lax.all_gather(x, axis_name, tiled=True)


def _to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    return jax.lax.all_to_all(pack(x, route), axis_name, 0, 0).reshape(-1, x.shape[1])


def _to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    slots = rows.reshape(*route.token_of_slot.shape, rows.shape[1])
    return unpack(jax.lax.all_to_all(slots, axis_name, 0, 0), route)


_BUILT_IN = {
    "gather": Transport("gather", _all_tokens, lambda rows, route, axis_name: sum_scatter(rows, axis_name, 0)),
    "all_to_all": Transport("all_to_all", _to_experts, _to_home),
    "pairwise": Transport("pairwise", pairwise.to_experts, pairwise.to_home),
}


def functions_of(transport: TransportName | Transport) -> Transport:
    """Returns the (to_experts, to_home) functions of a transport."""
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


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch_in_fp8(
    x: BFloat16[Array, "tokens hidden"],
    route: Route,
    axis_name: str,
    transport: TransportName | Transport,
    steps: tuple[int, ...] = (),
) -> RoundedTokens:
    """Quantizes tokens to e4m3 (one scale per 128 elements) and dispatches them. Empty slots have value and scale zero.

    Experts in FP8 round each token separately, so rounding before or after the transfer yields the same bits. Rounded tokens
    need half the bytes. The gradient is `dispatch`'s: rounding has derivative 1, as in the experts of one device.
    """
    # XLA may drop a cast to bf16 and back.
    info = jnp.finfo(x.dtype)
    rounded = quantise_rows(jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant))
    return RoundedTokens.of(_of_bytes(functions_of(transport).to_experts(_to_bytes(rounded), route, axis_name)))


def _to_bytes(rows: QuantisedRows) -> UInt8[Array, "rows bytes"]:
    """Returns values and scales of each row as one row. XLA may widen transfers of FP8 to 16 bits, but not of bytes."""
    values, scales = (jax.lax.bitcast_convert_type(a, jnp.uint8) for a in (rows.values, rows.scales.T))
    return jnp.concatenate([values, scales.reshape(len(values), -1)], axis=1)


def _of_bytes(rows: UInt8[Array, "rows bytes"]) -> QuantisedRows:
    """Inverts `_to_bytes`: GROUP of GROUP + 4 bytes are values."""
    hidden = rows.shape[1] // (GROUP + 4) * GROUP
    values, scales = rows[:, :hidden], rows[:, hidden:].reshape(len(rows), -1, 4)
    return QuantisedRows(
        jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn), jax.lax.bitcast_convert_type(scales, jnp.float32).T
    )  # fmt: skip


def _in_fp8_forward(x, route, axis_name, transport, steps):
    return dispatch_in_fp8(x, route, axis_name, transport, steps), route


def _in_fp8_backward(axis_name, transport, steps, route, gradients):
    d_rows = gradients.like
    return combine(d_rows, route, axis_name, transport, steps).astype(d_rows.dtype), None


dispatch_in_fp8.defvjp(_in_fp8_forward, _in_fp8_backward)
