"""Transport `ragged`: as `all_to_all`, but of each buffer only the filled slots travel (`lax.ragged_all_to_all`).

On four H200s under jax 0.11.2 that collective was 34 times slower than `all_to_all`, at 7.8 GB/s: it is here for releases
where it is fast. XLA has none for CPUs, where `emulated_ragged_all_to_all` stands in.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import pack, unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """As `all_to_all.to_experts`."""
    received = jax.lax.all_to_all(route.sent, axis_name, 0, 0, tiled=True)
    return _exchange(pack(x, route), route.sent, received, axis_name).reshape(-1, x.shape[1])


def to_home(rows: Float[Array, "received features"], route: Route, axis_name: str) -> Float[Array, "tokens features"]:
    """As `all_to_all.to_home`."""
    received = jax.lax.all_to_all(route.sent, axis_name, 0, 0, tiled=True)
    slots = rows.reshape(*route.token_of_slot.shape, rows.shape[1])
    return unpack(_exchange(slots, received, route.sent, axis_name), route)


def _exchange(slots: Array, sent: Array, received: Array, axis_name: str) -> Array:
    """The first sent[d] slots go to device d; those of device s land in slots[s]. The others are zero."""
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
    """What `lax.ragged_all_to_all` computes, out of all-gathers: memory and traffic of n operands.

    Device s sends operand[input_offsets[d] : + send_sizes[d]] to device d, which writes it to its output from row
    output_offsets[d] on: the offsets are the sender's.
    """
    me = jax.lax.axis_index(axis_name)
    operands, *of_senders = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )  # fmt: skip
    begins, sizes, places = (a[:, me] for a in of_senders)
    row = jnp.arange(output.shape[0])
    covers = (row >= places[:, None]) & (row < (places + sizes)[:, None])
    sender = jnp.argmax(covers, axis=0)
    source = jnp.clip(begins[sender] + row - places[sender], 0, operand.shape[0] - 1)
    return jnp.where(covers.any(axis=0)[:, None], operands[sender, source], output)
