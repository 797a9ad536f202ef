"""FP8 checkpoints as DeepSeek-V3, Qwen3-*-FP8 and others publish them, dequantised while they are read.

Section 3.3 of the DeepSeek-V3 report (https://arxiv.org/abs/2412.19437): a matrix is stored as e4m3. A second tensor
`NAME_scale_inv` has one scale for each block of 128 x 128. At the lower and right edges blocks are cut off.

    weight[..., i, j] = float32(stored[..., i, j]) * float32(scale_inv[..., i // 128, j // 128])

The result is rounded once to the dtype of the parameter. For matrices of whole blocks it equals, bit for bit, `transformers`
with `dequantize=True`, which accepts no others. For matrices with cut-off blocks (the 576 rows of V3's kv_a_proj_with_mqa) it
equals DeepSeek's own `weight_dequant`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_jax.checkpoint.hf_files import FLOAT_DTYPES, QuantisedTensor, Slices, StoredTensor

BlockSize = tuple[int, int]
"""Rows and columns that share a scale."""

FIELDS_THAT_CHANGE_NO_WEIGHT = frozenset(
    "modules_to_not_convert modules_to_convert ignored_layers scale_fmt dequantize".split()
)  # fmt: skip
"""Fields that need no check: the files' headers say which tensors are quantised and in which dtype their scales are."""

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each byte in e4m3: a look-up is several times faster than a cast."""


def read_block_size(folder: Path) -> BlockSize | None:
    """Reads the block size from the quantization_config of `folder`/config.json; None if the checkpoint is not in FP8.

    Raises:
      ValueError: the quantisation is not e4m3 in blocks; the message names every field that is not understood.
    """
    given = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"{folder}: quantization_config={given!r} must be null or an object of fields with quant_method")
    method = given.get("quant_method")
    if method == "gptq":
        return None
    if method != "fp8":
        raise ValueError(
            f"{folder}: quant_method {method!r} is not supported, only 'fp8' and 'gptq' are; take the checkpoint in bfloat16"
        )
    fields = {k: v for k, v in given.items() if k not in FIELDS_THAT_CHANGE_NO_WEIGHT and k != "quant_method"}
    # The defaults of transformers' FineGrainedFP8Config.
    block_size = fields.pop("weight_block_size", [128, 128])
    supported = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
    problems = [f"{k}={fields.pop(k)!r} is not supported (only {v!r})" for k, v in supported.items() if fields.get(k, v) != v]
    problems += [f"unknown field {name}={fields[name]!r}" for name in sorted(fields.keys() - supported)]
    if not _is_block_size(block_size):
        problems.append(f"weight_block_size={block_size!r} must be two positive integers, such as [128, 128]")
    if problems:
        raise ValueError(f"{folder}: quantization_config is not understood: " + "; ".join(problems))
    return block_size[0], block_size[1]


def dequantised(tensors: dict[str, StoredTensor], block_size: BlockSize, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces each e4m3 matrix and its scales by one F32 tensor, and adds errors to `problems`.

    Reading a part of such a tensor reads that part of the matrix, and the scales of the blocks that it touches.
    """
    result = dict(tensors)
    for name, quantised in tensors.items():
        if quantised.dtype != "F8_E4M3":
            continue
        scale_name = f"{name}_scale_inv"
        scales = result.pop(scale_name, None)
        # F32 even if the scales are wrong: otherwise the matrix would get a second error line about its dtype.
        result[name] = replace(quantised, dtype="F32")
        if len(quantised.shape) < 2:
            problems.append(
                f"{name}: shape {list(quantised.shape)} in {quantised.file.name}, expected a matrix, as it is in FP8"
            )
            continue
        if scales is None:
            problems.append(f"{scale_name}: missing, but {name} in {quantised.file.name} is in FP8")
            continue
        expected = _blocks(quantised.shape, block_size)
        if scales.shape != expected:
            problems.append(
                f"{scale_name}: shape {list(scales.shape)} in {scales.file.name}, expected {list(expected)} for "
                f"{list(quantised.shape)} in blocks of {block_size[0]} x {block_size[1]}"
            )
        if scales.dtype not in FLOAT_DTYPES:
            problems.append(
                f"{scale_name}: dtype {scales.dtype} in {scales.file.name}, expected one of {', '.join(FLOAT_DTYPES)}"
            )
        result[name] = _product(quantised, scales, block_size)
    return result


def _is_block_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def _blocks(shape: tuple[int, ...], block_size: BlockSize) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix, or of a stack of matrices."""
    return (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], block_size, strict=True)))


def _product(quantised: StoredTensor, scales: StoredTensor, block_size: BlockSize) -> StoredTensor:
    """Returns quantised * scales as a tensor that is read in parts."""

    def read(slices: Slices) -> np.ndarray:
        (row, row_stop, _), (column, column_stop, _) = (
            s.indices(size) for s, size in zip(slices[-2:], quantised.shape[-2:], strict=True)
        )
        height, width = block_size
        first_row, first_column = row // height, column // width
        touched = slice(first_row, -(-row_stop // height)), slice(first_column, -(-column_stop // width))
        factors = scales.read((*slices[:-2], *touched)).astype(np.float32)
        offset = column - first_column * width
        factors = np.repeat(factors, width, axis=-1)[..., offset : offset + column_stop - column]
        values = _VALUES[quantised.read(slices).view(np.uint8)]
        for i in range(factors.shape[-2]):
            begin = (first_row + i) * height - row
            values[..., max(begin, 0) : begin + height, :] *= factors[..., i : i + 1, :]
        return values

    return replace(quantised, dtype="F32", read=read, quantised=QuantisedTensor(quantised, scales, block_size))
