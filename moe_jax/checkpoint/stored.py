"""Facts about stored weights: their dtype, and a fingerprint, computed from a few megabytes, that distinguishes checkpoints."""

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from moe_jax.checkpoint.hf_files import CheckpointError, Slices, open_tensors
from moe_jax.checkpoint.hf_load import find_checkpoint

ELEMENTS = 4096
"""Maximum number of elements read per tensor: even the smallest bf16 training step changes some of them."""


def weights_fingerprint(folder_or_hub_id: str | Path) -> str:
    """Computes a hash of all tensors' names, shapes and dtypes, and of some values of three tensors of each kind.

    Tensors are of one kind if their names differ only in numbers. The first, a middle and the last tensor of a kind are read.
    The hash does not depend on the folder or on how the weights are split into files.

    Raises:
      FileNotFoundError, ValueError: there is no such checkpoint.
    """
    tensors = open_tensors(find_checkpoint(folder_or_hub_id), [])
    digest = hashlib.blake2b(digest_size=16)
    kinds = defaultdict(list)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        if tensor.size:
            kinds[re.sub(r"\d+", "*", name)].append(tensor)
    for kind in kinds.values():
        for tensor in {id(tensor): tensor for tensor in (kind[0], kind[len(kind) // 2], kind[-1])}.values():
            digest.update(np.ascontiguousarray(tensor.read(_first_elements(tensor.shape))).tobytes())
    return digest.hexdigest()


def _first_elements(shape: tuple[int, ...]) -> Slices:
    """Returns the slices of a contiguous block of at most ELEMENTS elements at the beginning of a tensor."""
    slices: list[slice] = []
    room = ELEMENTS
    for size in reversed(shape):
        taken = min(size, max(room, 1))
        slices.insert(0, slice(0, taken))
        room //= taken
    return tuple(slices)


NOT_WEIGHTS = ("e_score_correction_bias", "expert_bias", "_scale_inv", "inv_freq")
"""Endings of tensors that are stored in f32 for weights of any dtype."""

NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16", "F64": "float32"}
"""The dtype of this library for each dtype of a file."""


@dataclass(frozen=True)
class StoredDtype:
    """The name of a dtype that can hold all stored weights, and a note if the files use other dtypes."""

    name: str
    remark: str | None = None


def stored_dtype(folder: str | Path) -> StoredDtype:
    """Returns the narrowest supported dtype that can hold all weights of a Hugging Face or Orbax folder.

    FP8 counts as bfloat16.

    Raises:
      CheckpointError, ValueError: the folder has no weights, or files are damaged.
    """
    folder = Path(folder).expanduser()
    found = _in_orbax(folder) if (folder / "params").is_dir() else _in_files(folder)
    # Models with FP8 in blocks also have a few tensors in bf16 and f32; they compute in bf16.
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
