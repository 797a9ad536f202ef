"""Moves tokens as transport `all_to_all` does, but only the filled slots of each buffer travel (`lax.ragged_all_to_all`).

    from moe_jax.experimental.ragged import RAGGED

    y, exchange = expert_parallel_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, ExpertParallel(transport=RAGGED))

It sends the fewest bytes of all transports. On four H200s under jax 0.11.2 that collective was 34 times slower than
`all_to_all`, at 7.8 GB/s. The transport waits here for a release in which the collective is fast. XLA has no such collective
for CPUs; `emulated_ragged_all_to_all` replaces it there.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from moe_jax.parallel.expert.routes import Route, pack, unpack
from moe_jax.parallel.expert.settings import Transport


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """Sends tokens to their experts' devices; the received rows are the same as the transport `all_to_all`'s."""
    received = jax.lax.all_to_all(route.sent, axis_name, 0, 0, tiled=True)
    return _exchange(pack(x, route), route.sent, received, axis_name).reshape(-1, x.shape[1])


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """Returns each token's sum over its experts on its own device, as the transport `all_to_all` does."""
    received = jax.lax.all_to_all(route.sent, axis_name, 0, 0, tiled=True)
    slots = rows.reshape(*route.token_of_slot.shape, rows.shape[1])
    return unpack(_exchange(slots, received, route.sent, axis_name), route)


RAGGED = Transport("ragged", to_experts, to_home)
"""The transport for `ExpertParallel(transport=RAGGED)`."""


def _exchange(slots: Array, sent: Array, received: Array, axis_name: str) -> Array:
    """Sends the first sent[d] slots to device d. The slots of device s arrive in slots[s]; all other slots are zero."""
    devices, height, features = slots.shape
    flat = slots.reshape(-1, features)
    own_block = jax.lax.axis_index(axis_name).astype(jnp.int32) * height
    exchanged = jax.lax.platform_dependent(
        flat,
        jnp.zeros_like(flat),
        jnp.arange(devices, dtype=jnp.int32) * height,
        sent,
        jnp.full_like(sent, own_block),
        received,
        cpu=partial(emulated_ragged_all_to_all, axis_name=axis_name),
        default=partial(jax.lax.ragged_all_to_all, axis_name=axis_name),
    )
    return exchanged.reshape(slots.shape)


def emulated_ragged_all_to_all(
    operand: Num[Array, "rows features"],
    output: Num[Array, "out_rows features"],
    input_offsets: Int[Array, "devices"],
    send_sizes: Int[Array, "devices"],
    output_offsets: Int[Array, "devices"],
    recv_sizes: Int[Array, "devices"],
    *,
    axis_name: str,
) -> Num[Array, "out_rows features"]:
    """Computes `lax.ragged_all_to_all` by all-gathers, with the memory and traffic of n operands.

    Device s sends operand[input_offsets[d] : + send_sizes[d]] to device d. Device d writes it to its output from row
    output_offsets[d] of the sender on.
    """
    me = jax.lax.axis_index(axis_name)
    operands, *of_senders = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )  # fmt: skip
    begins, sizes, offsets = (a[:, me] for a in of_senders)
    row = jnp.arange(output.shape[0])
    covers = (row >= offsets[:, None]) & (row < (offsets + sizes)[:, None])
    sender = jnp.argmax(covers, axis=0)
    source = jnp.clip(begins[sender] + row - offsets[sender], 0, operand.shape[0] - 1)
    return jnp.where(covers.any(axis=0)[:, None], operands[sender, source], output)
