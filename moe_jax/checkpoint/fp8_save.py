"""Writes matrices in the hub's FP8 format: e4m3 in blocks of 128 x 128, each with a scale, as `checkpoint.fp8` reads them.

The same matrices are in FP8 as in DeepSeek-V3 and Qwen3-*-FP8: every projection of attention, of dense layers and of experts.
Routers, norms, embedding and head keep their dtype. Blocks at the lower and right edges are cut off.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from moe_jax.checkpoint.hf_names import HfTensor, export, hf_tensors
from moe_jax.config import ModelConfig
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled, Quantised

SCALE = "_scale_inv"
"""The end of the name of a matrix's scales."""


def fp8_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the quantization_config of config.json, with the names of the modules that keep their dtype."""
    kept = [
        tensor.name.removesuffix(".weight")
        for tensor in hf_tensors(config)
        if tensor.name.endswith(("layernorm.weight", ".mlp.gate.weight", ".eh_proj.weight"))
    ]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head", *kept],
    }


def check_forms(state: nnx.State) -> None:
    """Refuses matrices that are quantised in another form than FP8 with a scale for 128 x 128.

    Raises:
      ValueError: such a matrix.
    """
    for leaf in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Quantised)):
        if isinstance(leaf, Quantised) and not (isinstance(leaf, BlockScaled) and leaf.block == FP8_BLOCK):
            raise ValueError(
                f"fp8=True writes whole matrices, or FP8 in blocks of {FP8_BLOCK[0]} x {FP8_BLOCK[1]}; these are quantised "
                "in another form: load the model whole"
            )


def sizes_in_fp8(config: ModelConfig, flat: dict[tuple, Any]) -> dict[str, int]:
    """Returns the bytes of each tensor that is written, by name, in order."""
    sizes = {}
    for tensor in hf_tensors(config):
        if not _is_projection(tensor):
            sizes[tensor.name] = math.prod(tensor.shape) * np.dtype(flat[tensor.path].dtype).itemsize
            continue
        sizes[tensor.name] = math.prod(tensor.shape)
        sizes[tensor.name + SCALE] = 4 * math.prod(_in_blocks(tensor.shape))
    return sizes


def export_in_fp8(config: ModelConfig, flat: dict[tuple, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the array of each tensor; arguments as in `hf_names.export`.

    Matrices that lie in FP8 are written as they are, others are rounded.
    """
    values = {path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in flat.items()}
    stored = {path: value for path, value in values.items() if isinstance(value, BlockScaled)}
    scales = {path: np.asarray(value.scales, np.float32) for path, value in stored.items()}
    codes = values | {path: value.codes for path, value in stored.items()}
    tensors = {tensor.name: tensor for tensor in hf_tensors(config)}
    for name, array in export(config, codes):
        tensor = tensors[name]
        if not _is_projection(tensor):
            yield name, array
        elif tensor.path in stored:
            yield name, array
            yield name + SCALE, scales[tensor.path][_index_in_blocks(tensor)]
        else:
            rounded = _rounded(array)
            yield name, rounded[0]
            yield name + SCALE, rounded[1]


def _is_projection(tensor: HfTensor) -> bool:
    return tensor.name.endswith("_proj.weight") and not tensor.name.endswith(".eh_proj.weight") or "_proj_with" in tensor.name


def _in_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // block) for size, block in zip(shape, FP8_BLOCK, strict=True))


def _index_in_blocks(tensor: HfTensor) -> tuple[int | slice, ...]:
    height = FP8_BLOCK[0]
    return tuple(
        slice(item.start // height, -(-item.stop // height)) if isinstance(item, slice) else item for item in tensor.index
    )


def _rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and the scales of a matrix."""
    rows, columns = matrix.shape
    padded = np.pad(matrix, [(0, -size % block) for size, block in zip(matrix.shape, FP8_BLOCK, strict=True)])
    codes, scales = map(np.asarray, _round(padded))
    return codes.view(ml_dtypes.float8_e4m3fn)[:rows, :columns], scales


@jax.jit
def _round(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    rounded = BlockScaled.fp8(matrix, jnp.float32)
    return rounded.codes, rounded.scales
