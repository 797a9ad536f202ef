"""Splits a sequence over the devices of a mesh axis, and joins it again.

For n devices, h = seq / 2n, and causal attention, in which token t attends to t keys:

    layout       tokens of device r                              causal work
    contiguous   2h tokens from r*2h on                          the device of the last tokens works longest, others wait
    zigzag       h tokens from r*h on and h from (2n-1-r)*h on   equal in every ring step
    striped      tokens r, r+n, r+2n, ...                        about equal, in small triangles in every ring step

(striped: Brandon et al., 2023, https://arxiv.org/abs/2311.09431; zigzag: ring-flash-attention.) In each layout a device's
tokens are in sequence order. So any interval of the sequence is an interval of a device's tokens.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.shapes import vary_as

Layout = Literal["contiguous", "zigzag", "striped"]


def shard_sequence(x: Array, num_shards: int, layout: Layout = "zigzag", axis: int = 1) -> Array:
    """Reorders the tokens along `axis` so that an even split over num_shards devices has the given layout.

    Call it on the whole array (JAX or NumPy) before `jax.shard_map` splits it with `PartitionSpec(None, "context")`.

    Raises:
        ValueError: an unknown layout, or a length that the layout cannot split.
    """
    _check(x.shape[axis], num_shards, layout)
    axis %= x.ndim
    before, after, arrays = x.shape[:axis], x.shape[axis + 1 :], x.__array_namespace__()
    if layout == "zigzag":
        halves = x.reshape(*before, 2, num_shards, -1, *after)
        first, second = (halves[(*map(slice, before), i)] for i in range(2))
        return arrays.stack([first, arrays.flip(second, axis=axis)], axis=axis + 1).reshape(x.shape)
    if layout == "striped":
        return x.reshape(*before, -1, num_shards, *after).swapaxes(axis, axis + 1).reshape(x.shape)
    return x


def unshard_sequence(x: Array, num_shards: int, layout: Layout = "zigzag", axis: int = 1) -> Array:
    """Inverts `shard_sequence`: restores the original order of tokens."""
    _check(x.shape[axis], num_shards, layout)
    axis %= x.ndim
    before, after, arrays = x.shape[:axis], x.shape[axis + 1 :], x.__array_namespace__()
    if layout == "zigzag":
        halves = x.reshape(*before, num_shards, 2, -1, *after)
        first, second = (halves[(*map(slice, before), slice(None), i)] for i in range(2))
        return arrays.stack([first, arrays.flip(second, axis=axis)], axis=axis).reshape(x.shape)
    if layout == "striped":
        return x.reshape(*before, num_shards, -1, *after).swapaxes(axis, axis + 1).reshape(x.shape)
    return x


def token_indices(length: int, device, num_shards: int, layout: Layout = "zigzag") -> Int[Array, "length"]:
    """Returns the global indices of a device's `length` tokens; `device` may be traced."""
    _check(length * num_shards, num_shards, layout)
    index = jnp.arange(length, dtype=jnp.int32)
    if layout == "zigzag":
        half = length // 2
        return jnp.where(index < half, index + device * half, index + (2 * num_shards - 2 - device) * half)
    if layout == "striped":
        return index * num_shards + device
    return index + device * length


def tokens_before(index: Int[Array, "..."], length: int, device, num_shards: int, layout: Layout) -> Int[Array, "..."]:
    """Returns how many of the device's `length` tokens precede global index `index`."""
    if layout == "zigzag":
        half = length // 2
        starts = device * half, (2 * num_shards - 1 - device) * half
        first, second = (jnp.clip(index - start, 0, half) for start in starts)
        return first + second
    if layout == "striped":
        return jnp.clip((index - device + num_shards - 1) // num_shards, 0, length)
    return jnp.clip(index - device * length, 0, length)


def join_in_order(parts: list[Array], devices: list[Int[Array, ""]], layout: Layout) -> Array:
    """Merges several devices' tokens [batch, tokens, ...] into sequence order; `devices` may be traced."""
    if len(parts) == 1:
        return parts[0]
    batch, length, *rest = parts[0].shape
    pieces, axis = _pieces(length, layout)
    shape = [batch, *pieces]
    shape[axis] *= len(parts)
    whole = vary_as(lax.empty((*shape, *rest), parts[0].dtype), parts[0])
    for part, positions in zip(parts, _positions(devices, layout), strict=True):
        part = part.reshape(batch, *pieces, *rest)
        for i, position in enumerate(positions):
            whole = lax.dynamic_update_slice_in_dim(whole, lax.slice_in_dim(part, i, i + 1, axis=axis), position, axis)
    return whole.reshape(batch, -1, *rest)


def split_in_order(whole: Array, devices: list[Int[Array, ""]], layout: Layout) -> list[Array]:
    """Inverts `join_in_order`."""
    if len(devices) == 1:
        return [whole]
    batch, tokens, *rest = whole.shape
    pieces, axis = _pieces(tokens // len(devices), layout)
    shape = [batch, *pieces]
    shape[axis] *= len(devices)
    whole = whole.reshape(*shape, *rest)

    def part(positions: list[Array]) -> Array:
        of_part = [lax.dynamic_slice_in_dim(whole, position, 1, axis) for position in positions]
        return jnp.concatenate(of_part, axis).reshape(batch, -1, *rest)

    return [part(positions) for positions in _positions(devices, layout)]


class Pieces(NamedTuple):
    """The runs of globally consecutive tokens on a device."""

    shape: tuple[int, int]
    """A device's tokens as two axes after the batch axis."""
    axis: int
    """The axis, of the array with the batch axis, along which pieces of several devices are interleaved."""


def _pieces(length: int, layout: Layout) -> Pieces:
    if layout == "striped":
        return Pieces((length, 1), 2)
    return Pieces((2, length // 2) if layout == "zigzag" else (1, length), 1)


def _positions(devices: list[Int[Array, ""]], layout: Layout) -> list[list[Int[Array, ""]]]:
    """Returns the positions of each device's pieces among the pieces of all these devices."""
    ranks = [sum(((other < device).astype(jnp.int32) for other in devices), jnp.int32(0)) for device in devices]
    if layout == "zigzag":
        return [[rank, 2 * len(devices) - 1 - rank] for rank in ranks]
    return [[rank] for rank in ranks]


def _check(seq: int, num_shards: int, layout: str) -> None:
    if layout not in get_args(Layout):
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(map(repr, get_args(Layout)))}")
    divisor = 2 * num_shards if layout == "zigzag" else num_shards
    if seq % divisor:
        raise ValueError(
            f"layout {layout!r} over {num_shards} devices needs a sequence length that is a multiple of {divisor}; got {seq}: "
            f"fill it up with {-seq % divisor} tokens of segment id 0"
        )
