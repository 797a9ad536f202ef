"""Quantised checkpoints, dequantised while they are read or kept as they are: FP8 (also written) and GPTQ's 4 bits.

FP8 is section 3.3 of the DeepSeek-V3 report (https://arxiv.org/abs/2412.19437), as Qwen3-*-FP8 and others publish it too: a
matrix is stored as e4m3. A second tensor `NAME_scale_inv` has one scale for each block of 128 x 128. At the lower and right
edges blocks are cut off.

    weight[..., i, j] = float32(stored[..., i, j]) * float32(scale_inv[..., i // 128, j // 128])

The result is rounded once to the dtype of the parameter. For matrices of whole blocks it equals, bit for bit, `transformers`
with `dequantize=True`, which accepts no others. For matrices with cut-off blocks (the 576 rows of V3's kv_a_proj_with_mqa) it
equals DeepSeek's own `weight_dequant`.

The same matrices are written in FP8: every projection of attention, of dense layers and of experts. Routers, norms, embedding
and head keep their dtype.

GPTQ (Qwen3-30B-A3B-GPTQ-Int4) stores a matrix W [out, in] transposed, as AutoGPTQ writes it (Frantar et al., 2022,
https://arxiv.org/abs/2210.17323):

    NAME.qweight [in/8, out] int32     code k of a column is in bits 4*(k%8) of row k//8
    NAME.scales [in/group, out]        W[n, k] = (code[k, n] - 8) * scales[k // group, n]; group_size -1: one group for all
    NAME.qzeros, NAME.g_idx            only symmetric codes are supported: each zero is 8 (stored as 7), and groups are in order
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

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


def read_quantisation(folder: Path) -> tuple[Literal["fp8"], BlockSize] | tuple[Literal["gptq"], int] | None:
    """Reads the quantization_config of `folder`/config.json; None if the checkpoint is not quantised.

    Returns:
      "fp8" with the block size, or "gptq" with the group size: -1 if a matrix's inputs are one group.

    Raises:
      ValueError: the quantisation is not e4m3 in blocks, or not symmetric 4 bits with groups in order, equal in all modules.
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
            return "gptq", _group_size(folder, given)
        case method:
            raise ValueError(
                f"{folder}: quant_method {method!r} is not supported, only 'fp8' and 'gptq' are; use the checkpoint in bfloat16"
            )


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


def _group_size(folder: Path, given: dict[str, Any]) -> int:
    wanted = {"bits": 4, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    if wrong := [
        f"{name}={given[name]!r} (only {value!r})" for name, value in wanted.items() if given.get(name, value) != value
    ]:
        raise ValueError(f"{folder}: GPTQ with {', '.join(wrong)} is not supported; use the checkpoint in bfloat16")
    group = given.get("group_size", 128)
    if not isinstance(group, int) or (group != -1 and (group < 8 or group % 8)):
        raise ValueError(
            f"{folder}: GPTQ's group_size={group!r} must be a multiple of 8, or -1 (one group); use the checkpoint in bfloat16"
        )
    # GPTQModel's rules for modules by name. "-:" leaves modules unquantised, which their tensors show.
    of_all = {"bits": 4, "group_size": group, "sym": True, "desc_act": False}
    for pattern, rule in (given.get("dynamic") or {}).items():
        if other := {} if pattern.startswith("-:") else {k: v for k, v in (rule or {}).items() if of_all.get(k, v) != v}:
            raise ValueError(
                f"{folder}: GPTQ's dynamic gives modules {pattern!r} {other}, and one form for all is read ({of_all}); "
                "use the checkpoint in bfloat16"
            )
    return group


def dequantised(tensors: dict[str, StoredTensor], block_size: BlockSize, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces each e4m3 matrix and its scales by one lazily dequantised f32 tensor; appends errors to `problems`.

    Reading a part of such a tensor reads that part of the matrix, and the scales of the blocks that it touches.
    """
    result = dict(tensors)
    for name, quantised in tensors.items():
        if quantised.dtype != "F8_E4M3":
            continue
        scale_name = f"{name}_scale_inv"
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
    """Returns the quantization_config of config.json, with the names of the modules that keep their dtype."""
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


STORED_ZERO = 0x77777777
"""Eight zero points of 8, each stored minus one."""


def unpacked(tensors: dict[str, StoredTensor], group_size: int, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces the four GPTQ tensors of each matrix by one lazily unpacked f32 tensor NAME.weight."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith((".qzeros", ".g_idx"))}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        base = name.removesuffix(".qweight")
        words, scales = result.pop(name), result.pop(f"{base}.scales", None)
        zeros, order = tensors.get(f"{base}.qzeros"), tensors.get(f"{base}.g_idx")
        if scales is None or zeros is None:
            problems.append(f"{base}: has qweight, and lacks {'scales' if scales is None else 'qzeros'}")
            continue
        num_in, num_out = 8 * words.shape[0], words.shape[1]
        group = num_in if group_size == -1 else group_size
        if num_in % group:
            problems.append(
                f"{base}: its {num_in} inputs are no multiple of group_size={group}, so that the last group is shorter; "
                "use the checkpoint in bfloat16"
            )
            continue
        shapes = (words.dtype, scales.shape, zeros.shape), ("I32", (num_in // group, num_out), (num_in // group, num_out // 8))
        if shapes[0] != shapes[1] or scales.dtype not in FLOAT_DTYPES:
            problems.append(f"{base}: qweight {words.dtype}, scales and qzeros are {shapes[0]}, expected {shapes[1]}")
            continue
        whole = slice(None), slice(None)
        if np.any(zeros.read(whole).view(np.uint32) != STORED_ZERO):
            problems.append(f"{base}: its codes are not symmetric; use the checkpoint in bfloat16")
        if order is not None and np.any(order.read((slice(None),)) != np.arange(num_in) // group):
            problems.append(f"{base}: its groups are not in order (desc_act); use the checkpoint in bfloat16")
        result[f"{base}.weight"] = _matrix(words, scales, group)
    return result


def _matrix(words: StoredTensor, scales: StoredTensor, group: int) -> StoredTensor:
    num_in, num_out = 8 * words.shape[0], words.shape[1]

    def codes_of(rows: slice) -> np.ndarray:
        """Returns the 4-bit codes of these rows, [rows, in]."""
        read = words.read((slice(None), rows)).view(np.uint32)
        shifts = 4 * np.arange(8, dtype=np.uint32)
        return ((read[:, None] >> shifts[:, None]) & 15).astype(np.uint8).reshape(num_in, -1).T

    def read_codes(slices: Slices) -> np.ndarray:
        codes = codes_of(slices[0])
        return (codes[:, ::2] << 4 | codes[:, 1::2])[:, slices[1]]

    def read_scales(slices: Slices) -> np.ndarray:
        return scales.read((slices[1], slices[0])).astype(np.float32).T

    def read(slices: Slices) -> np.ndarray:
        factors = np.repeat(read_scales((slices[0], slice(None))), group, axis=1)
        return ((codes_of(slices[0]).astype(np.float32) - 8) * factors)[:, slices[1]]

    of_codes = replace(words, shape=(num_out, num_in // 2), dtype="U8", read=read_codes)
    of_scales = replace(scales, shape=(num_out, num_in // group), dtype="F32", read=read_scales)
    quantised = QuantisedTensor(of_codes, of_scales, (1, group))
    return replace(words, shape=(num_out, num_in), dtype="F32", read=read, quantised=quantised)
