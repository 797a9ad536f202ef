"""Checkpoints in 4 bits, dequantised while they are read or kept as they are: GPTQ, AWQ, MXFP4, NVFP4, compressed-tensors.

A matrix W [out, in] is values[code[n, k]] * scale[n, k // group], rounded once to the parameter's dtype. Its tensors are

    GPTQ       NAME.qweight [in/8, out] int32         code k of a column is in bits 4*(k%8) of row k//8; value code - 8
               NAME.scales [in/group, out]            (Frantar et al., 2022, https://arxiv.org/abs/2210.17323)
               NAME.qzeros, NAME.g_idx                only symmetric codes: each zero is 8, stored as 7, and groups are in order
    AWQ        NAME.qweight [in, out/8] int32         column c is in bits 4*AWQ_PLACES[c%8] of word c//8
               NAME.qzeros, NAME.scales [in/group, out(/8)]          value code - zero; these are read, but not kept in 4 bits
               (Lin et al., 2023, https://arxiv.org/abs/2306.00978)
    int4       NAME.weight_packed [out, in/8] int32   code k of a row is in bits 4*(k%8) of word k//8; value code - 8
               NAME.weight_scale [out, in/group]      compressed-tensors' "pack-quantized" (Kimi-K2-Thinking)
    mxfp4      NAME_blocks [experts, out, in/32, 16] uint8           byte b of a block has code 2b in its low half, FP4_VALUES
               NAME_scales [experts, out, in/32] uint8               the exponent of 2, plus 127 (gpt-oss)
    nvfp4      NAME.weight_packed, or modelopt's NAME.weight [out, in/2] uint8, as in MXFP4
               NAME.weight_scale [out, in/16] e4m3, divided by NAME.weight_global_scale, or times modelopt's NAME.weight_scale_2

transformers decodes MXFP4 to the same numbers, as matrices [experts, in, out]; so does the tensor NAME here.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.checkpoint.hf_files import FLOAT_DTYPES, QuantisedTensor, Slices, StoredTensor
from moe_jax.layers.quantised import FP4_VALUES, INT4_VALUES

Parts = dict[str, StoredTensor]
"""The tensors of a matrix, by the ends of their names."""

STORED_ZERO = 0x77777777
"""GPTQ's eight zero points of 8, each stored minus one."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight neighboring columns."""

NOT_OF_WEIGHTS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales for activations and caches, which no weight needs."""


class Form(NamedTuple):
    """A form of matrices in 4 bits."""

    codes: str
    """The end of the name of a matrix's codes."""
    needed: tuple[str, ...]
    """The ends of the names of its other tensors."""
    make: Callable[[Parts, int], StoredTensor | str]
    """Returns the matrix of these tensors and this group size, or a problem."""
    optional: tuple[str, ...] = ()
    matrix: str = ".weight"
    """The end of the matrix's name."""


def unpacked(tensors: dict[str, StoredTensor], form: str, group: int, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces the tensors of each matrix by one lazily dequantised f32 tensor; appends errors to `problems`.

    Args:
      form: a key of `FORMS`.
      group: numbers of a row that share a scale; -1: the whole row.
    """
    of_form = FORMS[form]
    found = [n for n, tensor in tensors.items() if n.endswith(of_form.codes) and tensor.dtype not in FLOAT_DTYPES]
    bases = [name.removesuffix(of_form.codes) for name in found]
    ends = of_form.codes, *of_form.needed, *of_form.optional
    used = {base + end for base in bases for end in ends}
    result = {n: tensor for n, tensor in tensors.items() if n not in used and not n.endswith(NOT_OF_WEIGHTS)}
    for base in bases:
        parts = {end: tensors[base + end] for end in ends if base + end in tensors}
        if lacking := [end.strip("._") for end in of_form.needed if end not in parts]:
            problems.append(f"{base}: has {of_form.codes.strip('._')}, and lacks {', '.join(lacking)}")
            continue
        made = of_form.make(parts, group)
        if isinstance(made, str):
            problems.append(f"{base}: {made}")
        else:
            result[base + of_form.matrix] = made
    return result


def gptq_group(folder: Path, given: dict[str, Any]) -> int:
    """Returns the group size of GPTQ; -1 if a matrix's inputs are one group.

    Raises:
      ValueError: another setting than symmetric 4 bits with groups in order, equal in all modules.
    """
    wanted = {"bits": 4, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    _check(folder, "GPTQ", given, wanted)
    group = _group(folder, "GPTQ", given)
    # GPTQModel's rules for modules by name. "-:" leaves modules unquantised, which their tensors show.
    of_all = {"bits": 4, "group_size": group, "sym": True, "desc_act": False}
    for pattern, rule in (given.get("dynamic") or {}).items():
        if other := {} if pattern.startswith("-:") else {k: v for k, v in (rule or {}).items() if of_all.get(k, v) != v}:
            raise ValueError(
                f"{folder}: GPTQ's dynamic gives modules {pattern!r} {other}, and one form for all is read ({of_all}); "
                "use the checkpoint in bfloat16"
            )
    return group


def awq_group(folder: Path, given: dict[str, Any]) -> int:
    """Returns the group size of AWQ. Raises ValueError for another setting than 4 bits with zero points, of version gemm."""
    version = str(given.get("version", "gemm")).lower()
    _check(folder, "AWQ", given | {"version": version}, {"bits": 4, "zero_point": True, "version": "gemm"})
    return _group(folder, "AWQ", given)


def _group(folder: Path, method: str, given: dict[str, Any]) -> int:
    group = given.get("group_size", 128)
    if type(group) is not int or (group != -1 and (group < 8 or group % 8)):
        raise ValueError(
            f"{folder}: {method}'s group_size={group!r} must be a multiple of 8, or -1 (one group); use the checkpoint in "
            "bfloat16"
        )
    return group


def _check(folder: Path, method: str, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises if a setting that is given has another value than the only one that is read."""
    wrong = [f"{name}={given[name]!r} (only {value!r})" for name, value in wanted.items() if given.get(name, value) != value]
    if wrong:
        raise ValueError(f"{folder}: {method} with {', '.join(wrong)} is not supported; use the checkpoint in bfloat16")


Wanted = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""The dtypes and the shape that a tensor may have, by the end of its name."""


def _problem(parts: Parts, wanted: Wanted, num_in: int, group: int) -> str | None:
    """Returns a message if rows do not end with a group, or tensors have other dtypes or shapes than wanted."""
    if num_in % group:
        return (
            f"its {num_in} inputs are no multiple of group_size={group}, so that the last group is shorter; use the checkpoint "
            "in bfloat16"
        )
    given = {end: (parts[end].dtype, parts[end].shape) for end in wanted}
    if all(given[end][0] in dtypes and given[end][1] == shape for end, (dtypes, shape) in wanted.items()):
        return None
    expected = {end: (" or ".join(dtypes), shape) for end, (dtypes, shape) in wanted.items()}
    texts = [
        ", ".join(f"{end.strip('._')} {dtype} {list(shape)}" for end, (dtype, shape) in each.items())
        for each in (given, expected)
    ]
    return f"has {texts[0]}, expected {texts[1]}"


def _matrix(
    like: StoredTensor,
    shape: tuple[int, ...],
    group: int,
    values: tuple[float, ...],
    codes_of: Callable[[Slices], np.ndarray],
    scales_of: Callable[[Slices], np.ndarray],
) -> StoredTensor:
    """Returns a matrix, or a stack, that is read in parts; codes [.., rows, in] and scales are read for slices of rows."""
    table = np.array(values, np.float32)

    def read(slices: Slices) -> np.ndarray:
        factors = np.repeat(scales_of(slices[:-1]).astype(np.float32), group, axis=-1)
        return (table[codes_of(slices[:-1])] * factors)[..., slices[-1]]

    def read_codes(slices: Slices) -> np.ndarray:
        codes = codes_of(slices[:-1])
        return (codes[..., ::2] << 4 | codes[..., 1::2])[..., slices[-1]]

    def read_scales(slices: Slices) -> np.ndarray:
        return scales_of(slices[:-1]).astype(np.float32)[..., slices[-1]]

    of_codes = replace(like, shape=(*shape[:-1], shape[-1] // 2), dtype="U8", read=read_codes)
    of_scales = replace(like, shape=(*shape[:-1], shape[-1] // group), dtype="F32", read=read_scales)
    return replace(
        like, shape=shape, dtype="F32", read=read, quantised=QuantisedTensor(of_codes, of_scales, (1, group), values)
    )


def _of_words(words: np.ndarray) -> np.ndarray:
    """Returns the eight codes of each word along a new last axis, the lowest bits first."""
    return ((words.view(np.uint32)[..., None] >> 4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.uint8)


def _of_bytes(pairs: np.ndarray) -> np.ndarray:
    """Returns the codes of the last axis, two a byte, the low half first."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def _gptq(parts: Parts, group: int) -> StoredTensor | str:
    words, scales, zeros, order = (parts.get(end) for end in (".qweight", ".scales", ".qzeros", ".g_idx"))
    assert words is not None and scales is not None and zeros is not None
    num_in, num_out = 8 * words.shape[0], words.shape[1]
    group = num_in if group == -1 else group
    wanted: Wanted = {".qweight": (("I32",), words.shape), ".scales": (tuple(FLOAT_DTYPES), (num_in // group, num_out))}
    wanted[".qzeros"] = ("I32",), (num_in // group, num_out // 8)
    if (problem := _problem(parts, wanted, num_in, group)) is not None:
        return problem
    if np.any(zeros.read((slice(None), slice(None))).view(np.uint32) != STORED_ZERO):
        return "its codes are not symmetric; use the checkpoint in bfloat16"
    if order is not None and np.any(order.read((slice(None),)) != np.arange(num_in) // group):
        return "its groups are not in order (desc_act); use the checkpoint in bfloat16"

    def codes_of(rows: Slices) -> np.ndarray:
        return _of_words(words.read((slice(None), *rows))).transpose(1, 0, 2).reshape(-1, num_in)

    def scales_of(rows: Slices) -> np.ndarray:
        return scales.read((slice(None), *rows)).T

    return _matrix(words, (num_out, num_in), group, INT4_VALUES, codes_of, scales_of)


def _awq(parts: Parts, group: int) -> StoredTensor | str:
    words, zeros, scales = parts[".qweight"], parts[".qzeros"], parts[".scales"]
    num_in, num_out = words.shape[0], 8 * words.shape[1]
    group = num_in if group == -1 else group
    wanted: Wanted = {".qweight": (("I32",), words.shape), ".scales": (tuple(FLOAT_DTYPES), (num_in // group, num_out))}
    wanted[".qzeros"] = ("I32",), (num_in // group, num_out // 8)
    if (problem := _problem(parts, wanted, num_in, group)) is not None:
        return problem

    def read(slices: Slices) -> np.ndarray:
        start, stop, _ = slices[0].indices(num_out)
        of_words, first = slice(start // 8, -(-stop // 8)), start // 8 * 8

        def codes_of(tensor: StoredTensor) -> np.ndarray:
            codes = _of_words(tensor.read((slice(None), of_words)))[..., AWQ_PLACES]
            return codes.reshape(len(codes), -1)[:, start - first : stop - first].astype(np.float32)

        factors = scales.read((slice(None), slice(start, stop))).astype(np.float32)
        zero, factor = (np.repeat(of_groups, group, axis=0) for of_groups in (codes_of(zeros), factors))
        return ((codes_of(words) - zero) * factor).T[:, slices[1]]

    return replace(words, shape=(num_out, num_in), dtype="F32", read=read)


def _int4(parts: Parts, group: int) -> StoredTensor | str:
    words, scales = parts[".weight_packed"], parts[".weight_scale"]
    num_out, num_in = words.shape[0], 8 * words.shape[1]
    group = num_in if group == -1 else group
    wanted: Wanted = {
        ".weight_packed": (("I32",), words.shape),
        ".weight_scale": (tuple(FLOAT_DTYPES), (num_out, num_in // group)),
    }
    if (problem := _problem(parts, wanted, num_in, group)) is not None:
        return problem

    def codes_of(rows: Slices) -> np.ndarray:
        return _of_words(words.read((*rows, slice(None)))).reshape(-1, num_in)

    return _matrix(words, (num_out, num_in), group, INT4_VALUES, codes_of, lambda rows: scales.read((*rows, slice(None))))


def _mxfp4(parts: Parts, group: int) -> StoredTensor | str:
    blocks, scales = parts["_blocks"], parts["_scales"]
    wanted: Wanted = {"_blocks": (("U8",), (*blocks.shape[:3], group // 2)), "_scales": (("U8",), blocks.shape[:3])}
    num_in = math.prod(blocks.shape[2:3]) * group
    if (problem := _problem(parts, wanted, num_in, group)) is not None or len(blocks.shape) != 4:
        return problem or f"has blocks {list(blocks.shape)}, expected [experts, out, in/{group}, {group // 2}]"
    experts, num_out, _ = scales.shape

    def codes_of(rows: Slices) -> np.ndarray:
        read = blocks.read((*rows, slice(None), slice(None)))
        return _of_bytes(read.reshape(*read.shape[:2], -1))

    def scales_of(rows: Slices) -> np.ndarray:
        return np.ldexp(np.float32(1), scales.read((*rows, slice(None))).astype(np.int32) - 127)

    of_rows = _matrix(blocks, (experts, num_out, num_in), group, FP4_VALUES, codes_of, scales_of)

    def read(slices: Slices) -> np.ndarray:
        experts, columns, rows = slices
        return of_rows.read((experts, rows, columns)).swapaxes(1, 2)

    return replace(of_rows, shape=(experts, num_in, num_out), read=read)


def _nvfp4(parts: Parts, group: int) -> StoredTensor | str:
    codes, scales = parts.get(".weight_packed") or parts[".weight"], parts[".weight_scale"]
    name = ".weight_packed" if ".weight_packed" in parts else ".weight"
    num_out, num_in = codes.shape[0], 2 * codes.shape[1]
    wanted: Wanted = {name: (("U8",), codes.shape), ".weight_scale": (("F8_E4M3",), (num_out, num_in // group))}
    if (problem := _problem(parts, wanted, num_in, group)) is not None:
        return problem
    divided = ".weight_global_scale" in parts
    whole = np.float32(np.asarray(parts[".weight_global_scale" if divided else ".weight_scale_2"].read(())).reshape(()))

    def scales_of(rows: Slices) -> np.ndarray:
        own = scales.read((*rows, slice(None))).astype(np.float32)
        return own / whole if divided else own * whole

    return _matrix(
        codes, (num_out, num_in), group, FP4_VALUES, lambda rows: _of_bytes(codes.read((*rows, slice(None)))), scales_of
    )


FORMS: dict[str, Form] = {
    "gptq": Form(".qweight", (".scales", ".qzeros"), _gptq, (".g_idx",)),
    "awq": Form(".qweight", (".scales", ".qzeros"), _awq),
    "int4": Form(".weight_packed", (".weight_scale",), _int4, (".weight_shape",)),
    "mxfp4": Form("_blocks", ("_scales",), _mxfp4, matrix=""),
    "nvfp4": Form(".weight_packed", (".weight_scale", ".weight_global_scale"), _nvfp4, (".weight_shape",)),
    "nvfp4 of modelopt": Form(".weight", (".weight_scale", ".weight_scale_2"), _nvfp4),
}
"""The forms that are read."""
