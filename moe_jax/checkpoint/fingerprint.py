"""Tells two checkpoints of one architecture apart by a few megabytes of their weights."""

import hashlib
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from moe_jax.checkpoint.hf_files import Slices, open_tensors
from moe_jax.checkpoint.hf_load import find_checkpoint

ELEMENTS = 4096
"""The number of elements read of a tensor, at most: the smallest step of training in bf16 changes some of them."""


def weights_fingerprint(folder_or_hub_id: str | Path) -> str:
    """Computes a hash of all tensors' names, shapes and dtypes, and of some values of three tensors of each kind.

    Tensors are of one kind if their names differ only in numbers. The first, a middle and the last tensor of a kind are read.
    The hash depends neither on the place of the weights nor on their division into files.

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
