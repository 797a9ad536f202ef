"""Loads matrices in fewer bytes: FP8 and GPTQ as the files have them, or NF4 and FP8 made of each layer while it is read."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, Sharding

from moe_jax.checkpoint.streaming import Piece, load_parameter, pieces_by_layer, read_block
from moe_jax.checkpoint.weights import Weights, form_problems
from moe_jax.config import ModelConfig
from moe_jax.layers.moe import EXPERT_MATRICES, is_expert_matrix
from moe_jax.layers.quantised import FP8_BLOCK, INT4_VALUES, NF4_BLOCK, BlockScaled, FourBits, Quantised
from moe_jax.parallel.layout import quantised_sharding

_logger = logging.getLogger(__name__)


def check_weights(weights: str, is_quantised: bool, config: ModelConfig) -> None:
    """Raises a ValueError for a form that does not exist, or that the checkpoint cannot have."""
    if problems := form_problems(weights):
        raise ValueError("; ".join(problems))
    if weights == "as stored" and not is_quantised:
        raise ValueError("weights='as stored' keeps quantised matrices, and this checkpoint has none; take 'nf4', or 'whole'")
    if weights == "nf4":
        _check_nf4(config)


def _check_nf4(config: ModelConfig) -> None:
    """Refuses experts whose rows do not end at NF4's blocks, and a model without experts, which would stay whole."""
    if config.experts is None or not config.routed_layers:
        raise ValueError("weights='nf4' makes 4 bits of experts, and this model has none; take 'whole'")
    rows = dict(zip(EXPERT_MATRICES, (config.hidden_size, config.experts.moe_intermediate_size), strict=True))
    if wrong := [f"experts.{name}: {size} is no multiple of {NF4_BLOCK}" for name, size in rows.items() if size % NF4_BLOCK]:
        raise ValueError(
            f"weights='nf4' has a scale for {NF4_BLOCK} numbers of a row, and rows of this model do not end there: "
            f"{', '.join(wrong)}; take 'whole'"
        )


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
      sharding: of the whole matrices. On a mesh, quantised experts are split along their own axis alone, and others are whole.
    """
    is_of_experts = is_expert_matrix(path)
    if isinstance(sharding, NamedSharding):
        sharding = quantised_sharding(path, shape, sharding.mesh)
    stored = [piece.stored.quantised for piece in pieces]
    if weights == "as stored" and all(tensor is not None for tensor in stored):
        return _load_as_stored(path, pieces, shape, dtype, sharding, on_read)
    if weights == "fp8" and is_of_experts:
        if all(tensor is not None and tensor.block_size == FP8_BLOCK for tensor in stored):
            return _load_as_stored(path, pieces, shape, dtype, sharding, on_read)
        return _load_rounded(BlockScaled.fp8, pieces, shape, dtype, sharding, on_read)
    if weights == "nf4" and is_of_experts:
        return _load_rounded(FourBits.nf4, pieces, shape, dtype, sharding, on_read)
    return None


def _load_as_stored(path, pieces: list[Piece], shape, dtype, sharding, on_read) -> Quantised | None:
    first = pieces[0].stored.quantised
    assert first is not None
    block = first.block_size
    if not all(_ends_at_blocks(piece, block, shape) for piece in pieces):
        _logger.warning("%s: its parts do not end at blocks of %d x %d; it is kept whole", ".".join(map(str, path)), *block)
        return None
    load = partial(load_parameter, sharding=sharding, layer_axes=int(path[0] == "stages"), on_read=on_read)

    def parts(name: str, blocks: tuple[int, int]) -> tuple[list[Piece], tuple[int, ...]]:
        """The pieces of one of the two tensors, and its shape, where a number stands for a block of the matrix."""
        of_tensor = [
            replace(
                piece,
                stored=getattr(piece.stored.quantised, name),
                bounds=(*piece.bounds[:-2], *_in_blocks(piece.bounds[-2:], blocks)),
            )
            for piece in pieces
        ]
        return of_tensor, (*shape[:-2], *(stop for _, stop in _in_blocks([(0, size) for size in shape[-2:]], blocks)))

    scales = load(*parts("scales", block), np.dtype(np.float32))
    if first.codes.dtype == "U8":
        return FourBits(load(*parts("codes", (1, 2)), np.dtype(np.uint8)), scales, jnp.dtype(dtype), INT4_VALUES, block[1])
    codes = load(*parts("codes", (1, 1)), np.dtype(ml_dtypes.float8_e4m3fn))
    return BlockScaled(codes, scales, jnp.dtype(dtype), block)


def _ends_at_blocks(piece: Piece, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
    axes = zip(piece.bounds[-2:], block, shape[-2:], strict=True)
    return all(begin % size == 0 and (end % size == 0 or end == whole) for (begin, end), size, whole in axes)


def _in_blocks(bounds: Any, block: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((begin // size, -(-end // size)) for (begin, end), size in zip(bounds, block, strict=True))


def _load_rounded(form: Callable[..., Quantised], pieces: list[Piece], shape, dtype, sharding, on_read) -> Quantised:
    """Quantises layer by layer on the device: there is never more than one layer whole."""
    like = jax.eval_shape(partial(form, dtype=dtype), jax.ShapeDtypeStruct(shape, dtype))
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
