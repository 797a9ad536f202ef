"""Finds a checkpoint's files, here or on the hub, and reads slices of their tensors without reading the rest.

The `safetensors` library maps safetensors files into memory. If there are none, `torch.load(weights_only=True, mmap=True)` maps
PyTorch's .bin files, and runs no code from them.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import ml_dtypes
import numpy as np
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import safe_open

from moe_jax.runtime.environment import program

MAX_PROBLEMS_LISTED = 50

FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have in a file, by their names in safetensors headers; `checkpoint.quantised` adds F8_E4M3."""

SMALL_FILES = ("*.json", "tokenizer*", "tokenization_*.py", "*.model", "vocab.*", "merges.txt", "*.jinja")
"""The files that describe a model and its tokenizer: all files except the weights."""

Slices = tuple[slice, ...]


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message lists all problems."""

    def __init__(self, folder: Path, problems: list[str]):
        lines = [f"the checkpoint in {folder} cannot be loaded; problems: {len(problems)}", *problems[:MAX_PROBLEMS_LISTED]]
        if len(problems) > MAX_PROBLEMS_LISTED:
            lines.append(f"... and {len(problems) - MAX_PROBLEMS_LISTED} more")
        super().__init__("\n  ".join(lines))
        self.problems = problems


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint file: its header, and `read(slices)`, which reads only these elements from disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Slices], np.ndarray]
    quantised: "QuantisedTensor | None" = None
    """The two tensors whose product this tensor is, if it is quantised."""

    @property
    def size(self) -> int:
        """The number of elements; 0 for empty placeholder tensors that some programs write."""
        return math.prod(self.shape)


class QuantisedTensor(NamedTuple):
    """A quantised matrix, stored as a tensor of codes and one of scales."""

    codes: StoredTensor
    """e4m3 of the matrix's shape; or U8 with two codes of 4 bits a byte, along the rows."""
    scales: StoredTensor
    block_size: tuple[int, int]
    """Rows and columns that share a scale."""
    values: tuple[float, ...] = ()
    """The values of the 16 codes of 4 bits."""


def downloaded(hub_id: str, patterns: Sequence[str]) -> Path:
    """Downloads the model's missing files that match a pattern; returns the local folder, without subfolders.

    Asks the hub once for a list of all files; an unknown id or a missing network raises then, without retries.

    Raises:
      FileNotFoundError: there is no such model on the hub, it is not open to this user, or the hub cannot be reached.
    """
    wanted = f"{hub_id!r} is neither a folder with a checkpoint nor a model on the Hugging Face hub"
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise FileNotFoundError(wanted) from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{hub_id!r} is a model whose terms must be accepted on https://huggingface.co/{hub_id}; then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{wanted} (a private one needs `hf auth login` or HF_TOKEN)") from error
    except (HfHubHTTPError, OSError) as error:
        # The first line of the client's message gives the reason; its further lines are guesses.
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"{wanted} that can be reached: {reason}") from error


def open_tensors(folder: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of all weight files of `folder` by name; reads headers only, and adds errors to `problems`.

    Files are chosen as in transformers: model.safetensors, else the files that model.safetensors.index.json names; then any
    other *.safetensors; then the same for pytorch_model*.bin.
    """
    for single, pattern, read_file in (
        ("model.safetensors", "*.safetensors", _open_safetensors),
        ("pytorch_model.bin", "pytorch_model*.bin", _open_torch),
    ):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return _open_files([folder / single], read_file, problems)
        if index.is_file():
            return _open_indexed(index, read_file, problems)
        files = sorted(folder.glob(pattern))
        if files:
            return _open_files(files, read_file, problems)
    if (folder / "params").is_dir():
        problems.append(
            f"this is an Orbax checkpoint: `{program()} convert FOLDER TARGET --to hf` makes a Hugging Face folder of it"
        )
    problems.append("no weight files: expected model.safetensors, *.safetensors with an index, or pytorch_model*.bin")
    return {}


def _open_files(files: list[Path], read_file, problems: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            for name, tensor in read_file(file):
                if name in tensors:
                    problems.append(f"{name}: in {tensors[name].file.name} and again in {file.name}")
                tensors[name] = tensor
        except ImportError:
            raise
        except Exception as error:  # the readers raise many types for a truncated file or another format
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"{file.name}: cannot be read, it is truncated or corrupt ({text})")
    return tensors


def _open_indexed(index: Path, read_file, problems: list[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of the files that an index names, and checks that each is in the file named there."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        wanted = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{index.name}: not an index with a weight_map of tensor names to file names ({error!r})")
        return {}
    files = sorted(set(wanted.values()))
    for file in files:
        if Path(file).name != file:
            problems.append(f"{index.name}: names {file!r}, which is not a file name in the same folder")
        elif not (index.parent / file).is_file():
            problems.append(f"{file}: missing, but {index.name} names it")
    present = [index.parent / file for file in files if Path(file).name == file and (index.parent / file).is_file()]
    count = len(problems)
    tensors = _open_files(present, read_file, problems)
    if len(problems) > count:
        return tensors  # tensors of an unreadable file need no error line each
    names = {file.name for file in present}
    for name, file in wanted.items():
        if file in names and (name not in tensors or tensors[name].file.name != file):
            problems.append(f"{name}: not in {file}, where {index.name} has it")
    problems += [f"{name}: in {t.file.name}, but not in {index.name}" for name, t in tensors.items() if name not in wanted]
    return tensors


def _open_safetensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    # The handle stays open and the file mapped while a StoredTensor of the file lives.
    handle = safe_open(file, framework="numpy")
    offsets: dict[str, int] = {}
    for name in handle.keys():
        view = handle.get_slice(name)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype == "F8_E4M3":
            offsets = offsets or _offsets(file)
            read = partial(_read_fp8, file, shape, offsets[name])
        else:
            read = partial(_read_safetensors, handle, name)
        yield name, StoredTensor(file, shape, dtype, read)


def _offsets(file: Path) -> dict[str, int]:
    """Returns each tensor's offset in a safetensors file. The data follows the header: 8 bytes with its length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + tensor["data_offsets"][0] for name, tensor in header.items()}


def _read_safetensors(handle: Any, name: str, slices: Slices) -> np.ndarray:
    return handle.get_slice(name)[slices] if slices else handle.get_tensor(name)


def _read_fp8(file: Path, shape: tuple[int, ...], offset: int, slices: Slices) -> np.ndarray:
    # numpy has no such dtype, so the library offers it only for torch.
    return np.array(np.memmap(file, ml_dtypes.float8_e4m3fn, "r", offset, shape)[slices])


def _open_torch(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{file} is in PyTorch's .bin format, which torch reads: pip install torch, or get a safetensors checkpoint"
        ) from error
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

    def read(tensor: Any, slices: Slices) -> np.ndarray:
        part = tensor[slices].contiguous()
        if part.dtype == torch.bfloat16:  # numpy has no bfloat16 of its own, and torch does not know ml_dtypes'
            return part.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return part.numpy()

    for name, tensor in torch.load(file, map_location="cpu", weights_only=True, mmap=True).items():
        yield (
            name,
            StoredTensor(file, tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)), partial(read, tensor.detach())),
        )
