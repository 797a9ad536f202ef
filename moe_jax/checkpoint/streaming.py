"""Streams slices of files to shards on devices, with one layer of one parameter in host memory at a time.

A stacked parameter [layers, ...] is filled in place: each device's buffer is donated to the write of every layer. So neither
the host nor the device ever holds a second copy of the parameter.

Matrices may be loaded in fewer bytes: FP8 and 4 bits as stored, or quantised to NF4 or FP8 layer by layer.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from moe_jax.checkpoint.hf_files import Slices, StoredTensor
from moe_jax.checkpoint.hf_names import HfTensor
from moe_jax.layers.moe import is_expert_matrix
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled, FourBits, Quantised, splittable
from moe_jax.models.precision import Weights
from moe_jax.parallel.layout import parameter_sharding

READ_CHUNK_BYTES = 64 * 2**20
"""Maximum number of bytes of a file that are copied at once into a host block."""

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) along each axis."""


@dataclass(frozen=True)
class Piece:
    """A stored tensor and the part of a parameter that it fills.

    Attributes:
      bounds: the position along every axis of the parameter.
      has_axis: for each axis of the parameter, True if the tensor has it; a layer's or expert's tensor lacks the first axes.
    """

    stored: StoredTensor
    bounds: Bounds
    has_axis: tuple[bool, ...]


def piece_of(tensor: HfTensor, stored: StoredTensor) -> Piece:
    """Locates the stored tensor within its parameter."""
    if tensor.transposed or tensor.in_turn:
        tensor, stored = _in_model(tensor, stored)
    sizes, index = list(tensor.shape), [item for item in tensor.index if item is not None]
    bounds: list[tuple[int, int]] = []
    if None in tensor.index:
        sizes, stored = sizes[1:], _without_first_axis(stored)
    for item in index:
        if isinstance(item, slice):
            bounds.append((item.start, item.stop))
            sizes.pop(0)
        else:
            bounds.append((item, item + 1))
    has_axis = [isinstance(item, slice) for item in index] + [True] * len(sizes)
    return Piece(stored, (*bounds, *((0, size) for size in sizes)), tuple(has_axis))


def _without_first_axis(stored: StoredTensor) -> StoredTensor:
    """Returns the only row of a matrix."""
    return replace(stored, shape=stored.shape[1:], read=lambda slices: stored.read((slice(0, 1), *slices))[0])


def _in_model(tensor: HfTensor, stored: StoredTensor) -> tuple[HfTensor, StoredTensor]:
    """Returns both with the parameter's layout: `HfTensor.in_model` of the columns that are read.

    All of an expert's rows are read. Codes and scales are not transposed.
    """
    experts, *rest = tensor.shape
    shape = (experts, *(rest[::-1] if tensor.transposed else rest))

    def read(slices: Slices) -> np.ndarray:
        experts, rows, *columns = slices
        of_file = (*columns, slice(None)) if tensor.transposed else (slice(None), *columns)
        return tensor.in_model(stored.read((experts, *of_file)))[:, rows]

    quantised = stored.quantised
    if quantised is not None:
        codes, scales = (
            _in_model(replace(tensor, shape=each.shape, transposed=False), each)[1]
            for each in (quantised.codes, quantised.scales)
        )
        quantised = quantised._replace(codes=codes, scales=scales)
    in_place = replace(tensor, shape=shape, transposed=False, in_turn=False)
    return in_place, replace(stored, shape=shape, read=read, quantised=quantised)


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns True if two stored matrices are equal, reading them in chunks."""
    if one.shape != other.shape:
        return False
    step = max(1, READ_CHUNK_BYTES // (one.shape[1] * 4))
    rows = one.shape[0]
    chunks = ((slice(start, min(start + step, rows)), slice(None)) for start in range(0, rows, step))
    return all(np.array_equal(one.read(chunk), other.read(chunk)) for chunk in chunks)


def held_parts(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, list[jax.Device]]:
    """Returns the distinct shards of an array on this process, each with its devices, so that each is read once."""
    holders: dict[Bounds, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        holders[tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))].append(device)
    return holders


def load_parameter(
    pieces: list[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    *,
    layer_axes: int,
    on_read: Callable[[int], object],
) -> jax.Array:
    """Loads a parameter from the `pieces` that cover it, as `dtype` and with `sharding`.

    Args:
      layer_axes: the number of leading axes that index the layers, which are then loaded one at a time. It is 1, or 3 in a
        pipeline, whose padding slots are zeros. Pieces have a single axis of layers.
      on_read: called with the number of bytes after each block that was read.
    """
    shards: dict[jax.Device, jax.Array] = {}
    for bounds, devices in held_parts(shape, sharding).items():
        if layer_axes:
            arrays = _load_stacked(pieces, bounds, shape[:layer_axes], dtype, devices, on_read)
        else:
            arrays = _load_whole(pieces, bounds, dtype, devices, on_read)
        shards |= zip(devices, arrays, strict=True)
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def _load_whole(pieces: list[Piece], bounds: Bounds, dtype: np.dtype, devices, on_read) -> list[jax.Array]:
    """Loads the part `bounds` of a parameter onto each of the devices."""
    block = np.empty([stop - start for start, stop in bounds], dtype)
    read_block(pieces, bounds, block)
    on_read(block.nbytes)
    return jax.block_until_ready([jax.device_put(block, device) for device in devices])


def _load_stacked(
    pieces: list[Piece], bounds: Bounds, places: tuple[int, ...], dtype: np.dtype, devices, on_read
) -> list[jax.Array]:
    """Loads the part like `_load_whole`, but layer by layer through one host block; `places` index the layer axes."""
    by_layer = pieces_by_layer(pieces)
    shape = [stop - start for start, stop in bounds]
    buffers = [jnp.zeros(shape, dtype, device=device) for device in devices]
    axes = len(places)
    block = np.empty([1] * axes + shape[axes:], dtype)
    for place in np.ndindex(*shape[:axes]):
        layer = int(np.ravel_multi_index([start + i for (start, _), i in zip(bounds, place, strict=False)], places))
        if layer in by_layer:
            read_block(by_layer[layer], ((layer, layer + 1), *bounds[axes:]), block.reshape(1, *shape[axes:]))
            blocks = [jax.device_put(block, device) for device in devices]
            buffers = [_write_layer(buffer, on_device, place) for buffer, on_device in zip(buffers, blocks, strict=True)]
            jax.block_until_ready(buffers)  # on CPU the device may share the block's memory, which is written again next
        on_read(block.nbytes)
    return buffers


def pieces_by_layer(pieces: list[Piece]) -> dict[int, list[Piece]]:
    """Returns the pieces of each layer of a stacked parameter."""
    by_layer: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_layer[piece.bounds[0][0]].append(piece)
    return by_layer


@partial(jax.jit, donate_argnums=0)
def _write_layer(buffer: jax.Array, block: jax.Array, place: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, block, (*place, *[0] * (buffer.ndim - len(place))))


def read_block(pieces: list[Piece], bounds: Bounds, block: np.ndarray) -> None:
    """Fills `block`, the part `bounds` of a parameter, from all overlapping pieces; casts to the block's dtype."""
    for piece in pieces:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.bounds, bounds, strict=True)]
        if any(a >= b for a, b in common):
            continue
        target = block[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, bounds, strict=True))]
        source = [
            slice(a - c, b - c)
            for (a, b), (c, _), keep in zip(common, piece.bounds, piece.has_axis, strict=True)
            if keep
        ]  # fmt: skip
        target = target[tuple(slice(None) if keep else 0 for keep in piece.has_axis)]
        _copy(piece.stored, source, target)


def _copy(stored: StoredTensor, source: list[slice], target: np.ndarray) -> None:
    """Copies stored[source] into target, at most READ_CHUNK_BYTES at once."""
    rows = target.shape[0]
    row_bytes = max(1, target.nbytes // rows)
    step = max(1, READ_CHUNK_BYTES // row_bytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        target[start:stop] = stored.read((slice(source[0].start + start, source[0].start + stop), *source[1:]))


_logger = logging.getLogger(__name__)


def load_quantised(
    path: tuple,
    pieces: list[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    weights: Weights,
    on_read: Callable[[int], object],
) -> Quantised | None:
    """Loads a parameter in quantised form; returns None if `weights` leaves this parameter unquantised.

    Args:
      dtype: the dtype of the dequantised matrices.
      sharding: the sharding of the dequantised matrices. Codes and scales are split over the same mesh, in whole blocks.
    """
    is_of_experts = is_expert_matrix(path)
    stored = [piece.stored.quantised for piece in pieces]
    if weights == "as stored" and all(tensor is not None for tensor in stored):
        return _load_as_stored(path, pieces, shape, dtype, sharding, on_read)
    if weights == "fp8" and is_of_experts:
        if all(tensor is not None and tensor.block_size == FP8_BLOCK for tensor in stored):
            return _load_as_stored(path, pieces, shape, dtype, sharding, on_read)
        return _load_rounded(BlockScaled.fp8, path, pieces, shape, dtype, sharding, on_read)
    if weights == "nf4" and is_of_experts:
        return _load_rounded(FourBits.nf4, path, pieces, shape, dtype, sharding, on_read)
    return None


def _in_parts(path: tuple, like: Quantised, sharding: Sharding) -> Sharding:
    """Returns the sharding of the codes and of the scales, on the mesh of `sharding`."""
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is None else parameter_sharding(path, splittable(like), mesh)


def _load_as_stored(path, pieces: list[Piece], shape, dtype, sharding, on_read) -> Quantised | None:
    first = pieces[0].stored.quantised
    assert first is not None
    block = first.block_size
    if not all(_ends_at_blocks(piece, block, shape) for piece in pieces):
        _logger.warning("%s: its parts do not end at blocks of %d x %d; it is kept whole", ".".join(map(str, path)), *block)
        return None

    def parts(name: str, blocks: tuple[int, int]) -> tuple[list[Piece], tuple[int, ...]]:
        """Returns the pieces and shape of one of a matrix's two tensors, with one element per `blocks` block."""
        of_tensor = [
            replace(
                piece,
                stored=getattr(piece.stored.quantised, name),
                bounds=(*piece.bounds[:-2], *_in_blocks(piece.bounds[-2:], blocks)),
            )
            for piece in pieces
        ]
        return of_tensor, (*shape[:-2], *(stop for _, stop in _in_blocks([(0, size) for size in shape[-2:]], blocks)))

    form: Callable[..., Quantised] = partial(BlockScaled, dtype=jnp.dtype(dtype), block=block)
    of_codes, code = (1, 1), np.dtype(ml_dtypes.float8_e4m3fn)
    if first.codes.dtype == "U8":
        form = partial(FourBits, dtype=jnp.dtype(dtype), values=first.values, block=block[1])
        of_codes, code = (1, 2), np.dtype(np.uint8)
    tensors = (*parts("codes", of_codes), code), (*parts("scales", block), np.dtype(np.float32))
    like = form(*(jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in tensors))
    options: Any = dict(sharding=_in_parts(path, like, sharding), layer_axes=int(path[0] == "stages"), on_read=on_read)
    return form(*(load_parameter(*tensor, **options) for tensor in tensors))


def _ends_at_blocks(piece: Piece, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    axes = zip(piece.bounds[-2:], block, shape[-2:], strict=True)
    return all(begin % size == 0 and (end % size == 0 or end == whole) for (begin, end), size, whole in axes)


def _in_blocks(bounds: Any, block: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((begin // size, -(-end // size)) for (begin, end), size in zip(bounds, block, strict=True))


def _load_rounded(form: Callable[..., Quantised], path, pieces: list[Piece], shape, dtype, sharding, on_read) -> Quantised:
    """Quantises layer by layer on the device: at most one layer is unquantised at a time."""
    like = jax.eval_shape(partial(form, dtype=dtype), jax.ShapeDtypeStruct(shape, dtype))
    sharding = _in_parts(path, like, sharding)
    loaded = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=sharding), like)
    block = np.empty((1, *shape[1:]), dtype)
    for layer, own in pieces_by_layer(pieces).items():
        read_block(own, ((layer, layer + 1), *((0, size) for size in shape[1:])), block)
        loaded = _with_layer(form, loaded, jax.device_put(block, sharding), layer)
        jax.block_until_ready(loaded)  # on CPU the device may share the block's memory, which is written again next
        on_read(block.nbytes)
    return loaded


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _with_layer(form: Callable[..., Quantised], loaded: Quantised, block: jax.Array, layer: jax.Array) -> Quantised:
    own = form(block, loaded.dtype)
    return jax.tree.map(lambda all_layers, one: jax.lax.dynamic_update_slice_in_dim(all_layers, one, layer, 0), loaded, own)
