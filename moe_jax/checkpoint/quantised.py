"""Quantised checkpoints, dequantised while they are read or kept as they are: FP8 (also written); `four_bits` has the others.

FP8 is section 3.3 of the DeepSeek-V3 report (https://arxiv.org/abs/2412.19437), as Qwen3-*-FP8 and others publish it too: a
matrix is stored as e4m3. A second tensor `NAME_scale_inv` has one scale for each block of 128 x 128. At the lower and right
edges blocks are cut off.

    weight[..., i, j] = float32(stored[..., i, j]) * float32(scale_inv[..., i // 128, j // 128])

compressed-tensors' FP8 (GLM-4.5-FP8) has `NAME_scale` instead, one for each row of the matrix, for all of it, or for blocks.

The result is rounded once to the dtype of the parameter. For matrices of whole blocks it equals, bit for bit, `transformers`
with `dequantize=True`, which accepts no others. For matrices with cut-off blocks (the 576 rows of V3's kv_a_proj_with_mqa) it
equals DeepSeek's own `weight_dequant`.

The same matrices are written in FP8: every projection of attention, of dense layers and of experts. Routers, norms, embedding
and head keep their dtype.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from moe_jax.checkpoint import four_bits
from moe_jax.checkpoint.hf_files import FLOAT_DTYPES, QuantisedTensor, Slices, StoredTensor
from moe_jax.checkpoint.hf_names import HfTensor, Index, export, hf_tensors
from moe_jax.config import ModelConfig
from moe_jax.layers.matrices import Role, declared
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled, Quantised

BlockSize = tuple[int, int]
"""Rows and columns that share a scale."""

FIELDS_THAT_CHANGE_NO_WEIGHT = frozenset(
    "modules_to_not_convert modules_to_convert ignored_layers scale_fmt dequantize".split()
)  # fmt: skip
"""Fields that need no check: the files' headers show which tensors are quantised, and their scales' dtype."""

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each byte in e4m3: a look-up is several times faster than a cast."""


Quantisation = tuple[Literal["fp8", "fp8 of compressed-tensors"], BlockSize] | tuple[str, int]
"""The form of a checkpoint: FP8 and its block size, or a key of `four_bits.FORMS` and its group size."""


def read_quantisation(folder: Path) -> Quantisation | None:
    """Reads the quantization_config of `folder`/config.json; None if the checkpoint is not quantised.

    Returns:
      The form. Block size 0: one scale for the whole axis. Group size -1: a matrix's inputs are one group.

    Raises:
      ValueError: the quantisation is in no form that is read, or modules differ.
    """
    given = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"{folder}: quantization_config={given!r} must be null or an object of fields with quant_method")
    match given.get("quant_method"):
        case "fp8":
            return "fp8", _block_size(folder, given)
        case "gptq":
            return "gptq", four_bits.gptq_group(folder, given)
        case "awq":
            return "awq", four_bits.awq_group(folder, given)
        case "mxfp4":
            return "mxfp4", 32
        case "modelopt" if given.get("quant_algo") == "NVFP4":
            return "nvfp4 of modelopt", 16
        case "compressed-tensors":
            return _of_compressed_tensors(folder, given)
        case method:
            algorithm = f" with quant_algo {given['quant_algo']!r}" if "quant_algo" in given else ""
            raise ValueError(
                f"{folder}: quant_method {method!r}{algorithm} is not supported, only fp8, gptq, awq, mxfp4, "
                "compressed-tensors and modelopt's NVFP4 are; use the checkpoint in bfloat16"
            )


def _of_compressed_tensors(folder: Path, given: dict[str, Any]) -> Quantisation:
    """Returns the form of compressed-tensors' weights, which must be one for all modules."""
    groups = given.get("config_groups")
    found = (
        [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
        if isinstance(groups, dict)
        else []
    )
    schemes: list[dict[str, Any]] = [{key: each.get(key) for key in _SCHEME} for each in found if isinstance(each, dict)]
    if not schemes or len(schemes) < len(found) or any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(f"{folder}: compressed-tensors must have weights of one kind for all modules; got {found}")
    for name in ("sparsity_config", "transform_config"):
        if (value := given.get(name)) and value != {"format": "dense"}:
            raise ValueError(
                f"{folder}: compressed-tensors with {name}={value!r} is not supported; use the checkpoint in bfloat16"
            )
    scheme = schemes[0]
    kind, bits, strategy, group, block = (
        scheme[key] for key in ("type", "num_bits", "strategy", "group_size", "block_structure")
    )
    is_even = type(group) is int and group > 0 and group % 8 == 0
    if scheme["actorder"] in (None, False, "static", "weight") and scheme["symmetric"] is not False:
        match kind, bits, strategy:
            case "int", 4, "group" if is_even:
                return "int4", group
            case "int", 4, "channel":
                return "int4", -1
            case "float", 4, "tensor_group" | "group" if group == 16:
                return "nvfp4", group
            case "float", 8, "channel":
                return _COMPRESSED_FP8, (1, 0)
            case "float", 8, "tensor":
                return _COMPRESSED_FP8, (0, 0)
            case "float", 8, "block" if isinstance(block, list) and [type(size) for size in block] == [int, int]:
                return _COMPRESSED_FP8, (block[0], block[1])
    raise ValueError(f"{folder}: compressed-tensors with weights {scheme} is not supported; use the checkpoint in bfloat16")


_SCHEME = ("type", "num_bits", "strategy", "group_size", "block_structure", "symmetric", "actorder")
_COMPRESSED_FP8: Literal["fp8 of compressed-tensors"] = "fp8 of compressed-tensors"


def as_floats(tensors: dict[str, StoredTensor], form: Quantisation, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces the tensors of each quantised matrix by one lazily dequantised f32 tensor; appends errors to `problems`."""
    kind, size = form
    if isinstance(size, int):
        return four_bits.unpacked(tensors, kind, size, problems)
    if kind == "fp8":
        return dequantised(tensors, size, problems)
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith(four_bits.NOT_OF_WEIGHTS)}
    return dequantised(without, size, problems, "_scale")


def _block_size(folder: Path, given: dict[str, Any]) -> BlockSize:
    """Returns the block size of FP8; an error names every field that is not understood."""
    fields = {k: v for k, v in given.items() if k not in FIELDS_THAT_CHANGE_NO_WEIGHT and k != "quant_method"}
    # The defaults of transformers' FineGrainedFP8Config.
    block_size = fields.pop("weight_block_size", [128, 128])
    supported = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
    problems = [f"{k}={fields.pop(k)!r} is not supported (only {v!r})" for k, v in supported.items() if fields.get(k, v) != v]
    problems += [f"unknown field {name}={fields[name]!r}" for name in sorted(fields.keys() - supported)]
    sizes = block_size if isinstance(block_size, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        problems.append(f"weight_block_size={block_size!r} must be two positive integers, such as [128, 128]")
    if problems:
        raise ValueError(f"{folder}: quantization_config is not understood: " + "; ".join(problems))
    return block_size[0], block_size[1]


def dequantised(
    tensors: dict[str, StoredTensor], block_size: BlockSize, problems: list[str], end_of_scales: str = "_scale_inv"
) -> dict[str, StoredTensor]:
    """Replaces each e4m3 matrix and its scales by one lazily dequantised f32 tensor; appends errors to `problems`.

    Reading a part of such a tensor reads that part of the matrix, and the scales of the blocks that it touches. A block size of
    0 is the whole axis.
    """
    result = dict(tensors)
    for name, quantised in tensors.items():
        if quantised.dtype != "F8_E4M3":
            continue
        scale_name = f"{name}{end_of_scales}"
        scales = result.pop(scale_name, None)
        # F32 even if the scales are wrong: otherwise the matrix would get a second error about its dtype.
        result[name] = replace(quantised, dtype="F32")
        if len(quantised.shape) < 2:
            problems.append(
                f"{name}: shape {list(quantised.shape)} in {quantised.file.name}, expected a matrix, as it is in FP8"
            )
            continue
        if scales is None:
            problems.append(f"{scale_name}: missing, but {name} in {quantised.file.name} is in FP8")
            continue
        height, width = (size or whole for size, whole in zip(block_size, quantised.shape[-2:], strict=True))
        own_block = height, width
        expected = _blocks(quantised.shape, own_block)
        if scales.shape in ((), (1,)) and expected == (1, 1):
            scales = replace(scales, shape=(1, 1), read=partial(_one_scale, scales))
        if scales.shape != expected:
            problems.append(
                f"{scale_name}: shape {list(scales.shape)} in {scales.file.name}, expected {list(expected)} for "
                f"{list(quantised.shape)} in blocks of {own_block[0]} x {own_block[1]}"
            )
        if scales.dtype not in FLOAT_DTYPES:
            problems.append(
                f"{scale_name}: dtype {scales.dtype} in {scales.file.name}, expected one of {', '.join(FLOAT_DTYPES)}"
            )
        result[name] = _product(quantised, scales, own_block)
    return result


def _one_scale(scale: StoredTensor, _: Slices) -> np.ndarray:
    return scale.read(()).reshape(1, 1)


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


IN_FP8 = ("attention", "mlp", "shared_experts", "experts")
"""The roles of matrices that FP8 checkpoints round (`layers.matrices`)."""

SCALE = "_scale_inv"
"""The end of the name of a matrix's scales."""


def fp8_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the quantization_config of config.json, with the names of the modules that keep their dtype.

    Raises:
      ValueError: checkpoints of this model have all experts in one tensor.
    """
    if config.fused_experts:
        raise ValueError(
            f"fp8=True writes a matrix for each expert, and {config.model_type} has one tensor for all: leave it out"
        )
    kept = [
        tensor.name.removesuffix(".weight")
        for tensor in hf_tensors(config)
        if tensor.name.endswith("layernorm.weight") or _role(tensor) in ("router", "predictor", "small")
    ]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head", *kept],
    }


def check_forms(state: nnx.State) -> None:
    """Checks that all quantised matrices are FP8 with one scale per 128 x 128 block, the only form that can be saved.

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
    """Returns the bytes of each tensor that `export_in_fp8` writes, by name and in order."""
    sizes = {}
    for tensor in hf_tensors(config):
        if not _is_projection(tensor):
            sizes[tensor.name] = math.prod(tensor.shape) * np.dtype(flat[tensor.path].dtype).itemsize
            continue
        sizes[tensor.name] = math.prod(tensor.shape)
        sizes[tensor.name + SCALE] = 4 * math.prod(_blocks(tensor.shape, FP8_BLOCK))
    return sizes


def export_in_fp8(config: ModelConfig, flat: dict[tuple, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for each tensor of an FP8 checkpoint; arguments as in `hf_names.export`.

    FP8 matrices are written unchanged, others are rounded.
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
    """Returns True for matrices of attention, dense blocks and experts."""
    return _role(tensor) in IN_FP8


def _role(tensor: HfTensor) -> Role | None:
    """Returns the role of a matrix; None for a vector."""
    found = declared(tensor.path) if tensor.name.endswith(".weight") else None
    return found.role if found is not None and found.axes > 1 else None


def _index_in_blocks(tensor: HfTensor) -> Index:
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
