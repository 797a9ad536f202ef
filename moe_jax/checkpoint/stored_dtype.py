"""Finds the dtype of a checkpoint's stored weights from file headers."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from moe_jax.checkpoint.hf_files import CheckpointError, open_tensors

NOT_WEIGHTS = ("e_score_correction_bias", "expert_bias", "_scale_inv", "inv_freq")
"""Endings of tensors that are stored in f32 beside weights of any dtype."""

NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16", "F64": "float32"}
"""The dtype of this library for each dtype of a file."""


@dataclass(frozen=True)
class StoredDtype:
    """The name of a dtype that holds all weights, and a remark if the files have another dtype or several."""

    name: str
    remark: str | None = None


def stored_dtype(folder: str | Path) -> StoredDtype:
    """Finds the narrowest dtype of this library that holds all weights of a Hugging Face or Orbax folder.

    FP8 counts as bfloat16.

    Raises:
      CheckpointError, ValueError: the folder has no weights, or files are damaged.
    """
    folder = Path(folder).expanduser()
    found = _in_orbax(folder) if (folder / "params").is_dir() else _in_files(folder)
    # FP8 in blocks stands beside a few tensors in bf16 and f32; its published models compute in bf16.
    if "F8_E4M3" in found:
        return StoredDtype("bfloat16", "the weights are FP8; they are written as bfloat16")
    names = sorted({NAMES.get(dtype, dtype) for dtype in found})
    name = names[0] if len(names) == 1 else "float32"
    if len(names) > 1:
        return StoredDtype(name, f"the weights are {' and '.join(names)}; all are written as {name}")
    return StoredDtype(name, "the weights are float64; they are written as float32" if found == {"F64"} else None)


def _in_files(folder: Path) -> set[str]:
    problems: list[str] = []
    tensors = open_tensors(folder, problems)
    if not tensors:
        raise CheckpointError(folder, problems)
    return {tensor.dtype for name, tensor in tensors.items() if tensor.dtype in NAMES and not name.endswith(NOT_WEIGHTS)}


def _in_orbax(folder: Path) -> set[str]:
    # Imported here: Orbax is slow to import, and no other checkpoint needs it.
    from moe_jax.checkpoint.orbax_params import stored_arrays

    stored = stored_arrays(folder.resolve())
    return {jnp.dtype(leaf.dtype).name for name, leaf in stored.items() if not name.endswith(NOT_WEIGHTS)}
