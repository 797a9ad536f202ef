"""Sends tokens in FP8 to the devices that hold their experts: `exchange.dispatch` of half the bytes.

Experts in FP8 round each token by itself. So tokens that are rounded and sent are the bits of tokens that are sent and rounded.
Gradients travel home as those of `dispatch`, in bf16.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, UInt8

from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedRows, quantise_rows
from moe_jax.kernels.experts.fp8.rounded_tokens import RoundedTokens
from moe_jax.parallel.expert.exchange import combine, functions_of
from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.settings import Transport, TransportName


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch_in_fp8(
    x: BFloat16[Array, "tokens hidden"],
    route: Route,
    axis_name: str,
    transport: TransportName | Transport,
    steps: tuple[int, ...] = (),
) -> RoundedTokens:
    """Returns what `dispatch` returns, rounded to e4m3 with a scale for 128 numbers; values and scales of empty slots are zero.

    The gradient is that of `dispatch`: the rounding has the derivative 1, as in the experts of one device.
    """
    # A cast to bf16 and back is one that XLA may leave out.
    info = jnp.finfo(x.dtype)
    rounded = quantise_rows(jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant))
    return RoundedTokens.of(_of_bytes(functions_of(transport).to_experts(_to_bytes(rounded), route, axis_name)))


def _to_bytes(rows: QuantisedRows) -> UInt8[Array, "rows bytes"]:
    """Returns values and scales of each row as one row. XLA may widen a transfer of FP8 to 16 bits, but none of bytes."""
    values, scales = (jax.lax.bitcast_convert_type(a, jnp.uint8) for a in (rows.values, rows.scales.T))
    return jnp.concatenate([values, scales.reshape(len(values), -1)], axis=1)


def _of_bytes(rows: UInt8[Array, "rows bytes"]) -> QuantisedRows:
    """Undoes `_to_bytes`: of GROUP + 4 bytes GROUP are values."""
    hidden = rows.shape[1] // (GROUP + 4) * GROUP
    values, scales = rows[:, :hidden], rows[:, hidden:].reshape(len(rows), -1, 4)
    return QuantisedRows(
        jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn), jax.lax.bitcast_convert_type(scales, jnp.float32).T
    )  # fmt: skip


def _forward(x, route, axis_name, transport, steps):
    return dispatch_in_fp8(x, route, axis_name, transport, steps), route


def _backward(axis_name, transport, steps, route, gradients):
    d_rows = gradients.like
    return combine(d_rows, route, axis_name, transport, steps).astype(d_rows.dtype), None


dispatch_in_fp8.defvjp(_forward, _backward)
