"""Checkpoints in GPTQ's 4 bits (Qwen3-30B-A3B-GPTQ-Int4), dequantised while they are read, or kept.

A matrix W [out, in] is stored transposed, as AutoGPTQ writes it (Frantar et al., 2022, https://arxiv.org/abs/2210.17323):

    NAME.qweight [in/8, out] int32     code k of a column stands in bits 4*(k%8) of row k//8
    NAME.scales [in/group, out]        W[n, k] = (code[k, n] - 8) * scales[k // group, n]; group_size -1: one group of all
    NAME.qzeros, NAME.g_idx            symmetric codes alone are read: each zero is 8 (stored as 7), and groups are in order
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_jax.checkpoint.hf_files import FLOAT_DTYPES, QuantisedTensor, Slices, StoredTensor

STORED_ZERO = 0x77777777
"""Eight zeros of 8, each stored less one."""


def read_group_size(folder: Path) -> int | None:
    """Reads the group size from the quantization_config of `folder`/config.json; None if the checkpoint is not in GPTQ.

    Returns -1 if a matrix's inputs are one group.

    Raises:
      ValueError: the quantisation is another one than symmetric 4 bits with groups in order, or differs between modules.
    """
    given = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") != "gptq":
        return None
    wanted = {"bits": 4, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    if wrong := [
        f"{name}={given[name]!r} (only {value!r})" for name, value in wanted.items() if given.get(name, value) != value
    ]:
        raise ValueError(f"{folder}: GPTQ with {', '.join(wrong)} is not supported; take the checkpoint in bfloat16")
    group = given.get("group_size", 128)
    if not isinstance(group, int) or (group != -1 and (group < 8 or group % 8)):
        raise ValueError(
            f"{folder}: GPTQ's group_size={group!r} must be a multiple of 8, or -1 (one group); take the checkpoint in bfloat16"
        )
    # GPTQModel's rules for modules of a name; "-:" leaves modules whole, which their tensors tell.
    of_all = {"bits": 4, "group_size": group, "sym": True, "desc_act": False}
    for pattern, rule in (given.get("dynamic") or {}).items():
        if other := {} if pattern.startswith("-:") else {k: v for k, v in (rule or {}).items() if of_all.get(k, v) != v}:
            raise ValueError(
                f"{folder}: GPTQ's dynamic gives modules {pattern!r} {other}, and one form for all is read ({of_all}); "
                "take the checkpoint in bfloat16"
            )
    return group


def unpacked(tensors: dict[str, StoredTensor], group_size: int, problems: list[str]) -> dict[str, StoredTensor]:
    """Replaces each matrix's four tensors by one F32 tensor NAME.weight, and adds errors to `problems`."""
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
                "take the checkpoint in bfloat16"
            )
            continue
        shapes = (words.dtype, scales.shape, zeros.shape), ("I32", (num_in // group, num_out), (num_in // group, num_out // 8))
        if shapes[0] != shapes[1] or scales.dtype not in FLOAT_DTYPES:
            problems.append(f"{base}: qweight {words.dtype}, scales and qzeros are {shapes[0]}, expected {shapes[1]}")
            continue
        whole = slice(None), slice(None)
        if np.any(zeros.read(whole).view(np.uint32) != STORED_ZERO):
            problems.append(f"{base}: its codes are not symmetric; take the checkpoint in bfloat16")
        if order is not None and np.any(order.read((slice(None),)) != np.arange(num_in) // group):
            problems.append(f"{base}: its groups are not in order (desc_act); take the checkpoint in bfloat16")
        result[f"{base}.weight"] = _matrix(words, scales, group)
    return result


def _matrix(words: StoredTensor, scales: StoredTensor, group: int) -> StoredTensor:
    num_in, num_out = 8 * words.shape[0], words.shape[1]

    def codes_of(rows: slice) -> np.ndarray:
        """The codes [rows, in]."""
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
