"""Loads matrices in fewer bytes: FP8 as the files have it, or NF4 made of each layer while it is read."""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from moe_jax.checkpoint.streaming import Piece, load_parameter, read_block
from moe_jax.checkpoint.weights import Weights
from moe_jax.layers.quantised import BlockScaled, NormalFloat4, Quantised
from moe_jax.layers.tickets import EXPERT_MATRICES

_logger = logging.getLogger(__name__)


def check_weights(weights: str, is_fp8: bool, devices: int) -> None:
    """Raises a ValueError for a form that does not exist, that the checkpoint lacks, or that lies on several devices."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} must be one of {', '.join(map(repr, get_args(Weights)))}")
    if weights == "as stored" and not is_fp8:
        raise ValueError("weights='as stored' keeps matrices in FP8, and this checkpoint has none; take 'nf4', or 'whole'")
    if weights != "whole" and devices > 1:
        raise ValueError(f"weights={weights!r} lie on one device; the mesh has {devices}")


def load_quantised(
    path: tuple,
    pieces: list[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    weights: Weights,
    on_read: Callable[[int], object],
) -> Quantised | None:
    """Loads a parameter in fewer bytes; returns None for one that this form of weights has whole.

    Args:
      dtype: that of the whole matrices.
      sharding: of one device.
    """
    if weights == "nf4" and path[-2:-1] == ("experts",) and path[-1] in EXPERT_MATRICES:
        return _load_nf4(pieces, shape, dtype, sharding, on_read)
    if weights == "as stored" and all(piece.stored.quantised is not None for piece in pieces):
        return _load_as_stored(path, pieces, shape, dtype, sharding, on_read)
    return None


def _load_as_stored(path, pieces: list[Piece], shape, dtype, sharding, on_read) -> BlockScaled | None:
    first = pieces[0].stored.quantised
    assert first is not None
    block = first.block_size
    if not all(_ends_at_blocks(piece, block, shape) for piece in pieces):
        _logger.warning("%s: its parts do not end at blocks of %d x %d; it is kept whole", ".".join(map(str, path)), *block)
        return None
    codes = [replace(piece, stored=piece.stored.quantised.codes) for piece in pieces if piece.stored.quantised]
    scales = [
        replace(piece, stored=piece.stored.quantised.scales, bounds=(*piece.bounds[:-2], *_in_blocks(piece.bounds[-2:], block)))
        for piece in pieces
        if piece.stored.quantised
    ]
    of_scales = (*shape[:-2], *(stop for _, stop in _in_blocks([(0, size) for size in shape[-2:]], block)))
    load = partial(load_parameter, sharding=sharding, layer_axes=int(path[0] == "stages"), on_read=on_read)
    return BlockScaled(
        load(codes, shape, np.dtype(ml_dtypes.float8_e4m3fn)),
        load(scales, of_scales, np.dtype(np.float32)),
        jnp.dtype(dtype),
        block,
    )


def _ends_at_blocks(piece: Piece, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    axes = zip(piece.bounds[-2:], block, shape[-2:], strict=True)
    return all(begin % size == 0 and (end % size == 0 or end == whole) for (begin, end), size, whole in axes)


def _in_blocks(bounds: Any, block: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((begin // size, -(-end // size)) for (begin, end), size in zip(bounds, block, strict=True))


def _load_nf4(pieces: list[Piece], shape, dtype, sharding, on_read) -> NormalFloat4:
    """Quantises layer by layer on the device: there is never more than one layer whole."""
    by_layer: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_layer[piece.bounds[0][0]].append(piece)
    quantise = partial(NormalFloat4.of, dtype=dtype)
    like = jax.eval_shape(quantise, jax.ShapeDtypeStruct(shape, dtype))
    loaded = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=sharding), like)
    block = np.empty((1, *shape[1:]), dtype)
    for layer, own in by_layer.items():
        read_block(own, ((layer, layer + 1), *((0, size) for size in shape[1:])), block)
        loaded = _with_layer(loaded, jax.device_put(block, sharding), layer)
        jax.block_until_ready(loaded)  # on CPU the device may share the block's memory, which is written again next
        on_read(block.nbytes)
    return loaded


@partial(jax.jit, donate_argnums=0)
def _with_layer(loaded: NormalFloat4, block: jax.Array, layer: jax.Array) -> NormalFloat4:
    own = NormalFloat4.of(block, loaded.dtype)
    return jax.tree.map(lambda all_layers, one: jax.lax.dynamic_update_slice_in_dim(all_layers, one, layer, 0), loaded, own)
