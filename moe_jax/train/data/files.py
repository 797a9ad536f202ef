"""The files of a data set, found in a fixed order: links are followed, and a file that is left out is named."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_jax.train.data.other_layouts import how_to_convert

FORMATS = ("auto", "chat", "text", "folder")
COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""Endings of compressed files, each with the command that unpacks one."""
MAX_NAMES = 10
"""A message names this many files at most, and counts the rest."""
_logger = logging.getLogger(__name__)


def data_files(path: str | Path, data_format: str) -> tuple[list[Path], str]:
    """Returns the files of a data set, sorted, and its format: `data_format`, or the one that "auto" finds.

    Raises:
      FileNotFoundError: there is no such path, or no file in it.
      ValueError: the format is unknown, or does not fit the files; a link leads nowhere; or `path` is a pipe or a device, or
        compressed. Also if, with "auto", .jsonl files and others stand side by side.
    """
    path = Path(path).expanduser()
    if data_format not in FORMATS:
        raise ValueError(f"data_format must be one of {', '.join(FORMATS)}; got {data_format!r}")
    if not path.exists():
        raise FileNotFoundError(f"no data at {path.resolve()}: give a folder of text files or a .jsonl file")
    if not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"the data at {path} is a pipe or a device, and documents are read in any order; write them to a regular file first"
        )
    path = path.resolve()
    files = [path] if path.is_file() else _files_below(path, data_format)
    _check_not_compressed(files)
    if data_format == "auto":
        data_format = _guess(path, files)
    if data_format == "folder" and path.is_file():
        code = how_to_convert(path)
        raise ValueError(
            f"{path} is a single file and no .jsonl file: give a .jsonl file, or a folder of text files"
            + ("" if code is None else f"\n{code}")
        )
    return files, data_format


def is_jsonl(file: Path) -> bool:
    """Tells JSON Lines by the name, in capitals or not."""
    return file.suffix.lower() in (".jsonl", ".ndjson")


def named(paths: Iterable[Path]) -> str:
    """Lists paths for a message, at most MAX_NAMES of them."""
    names = [str(path) for path in paths]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _files_below(folder: Path, data_format: str) -> list[Path]:
    # Sorted by their path in the folder, links included: the fingerprint of a data set follows this order.
    found = sorted(_entries(folder, (folder,)))
    if broken := [path for path in found if not path.exists()]:
        raise ValueError(f"links in {folder} that lead nowhere: {named(broken)}; mend or remove them")
    files = [path for path in found if path.is_file()]
    if data_format in ("chat", "text"):
        files = [path for path in files if is_jsonl(path)]
    if not files:
        raise FileNotFoundError(f"no {'.jsonl ' if data_format in ('chat', 'text') else ''}files in the folder {folder}")
    if left_out := sorted(set(found) - set(files)):
        _logger.warning("left out of the training data: %s", named(left_out))
    return files


def _entries(folder: Path, inside: tuple[Path, ...]) -> Iterator[Path]:
    """Yields the paths below `folder`, except folders and hidden files. A link back to a folder in `inside` is yielded too."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        real = path.resolve() if path.is_symlink() else inside[-1] / path.name
        if path.is_dir() and real not in inside:
            yield from _entries(path, (*inside, real))
        else:
            yield path


def _check_not_compressed(files: list[Path]) -> None:
    packed = [file for file in files if file.suffix.lower() in COMPRESSED]
    if packed:
        command = COMPRESSED[packed[0].suffix.lower()]
        raise ValueError(
            f"compressed data cannot be read by its place: {named(packed)}; unpack it first ({command} {packed[0]})"
        )


def _guess(path: Path, files: list[Path]) -> str:
    """Finds "folder" where no file is .jsonl; where all are, "chat" or "text" by the first line that is not empty."""
    others = [file for file in files if not is_jsonl(file)]
    if len(others) == len(files):
        if path.is_dir() and all(file.suffix.lower() == ".json" for file in files) and (code := how_to_convert(files[0])):
            raise ValueError(f"{path} holds .json files alone; data_format folder takes them as texts as they are\n{code}")
        return "folder"
    if others:
        raise ValueError(
            f"{path} holds .jsonl files and others, such as {others[0].name}: say which are meant, with data_format chat or "
            "text the .jsonl files alone, with folder all files as they are"
        )
    try:
        return "chat" if "messages" in json.loads(_first_line(files).decode("utf-8-sig")) else "text"
    except (ValueError, TypeError, RecursionError):
        return "text"


def _first_line(files: list[Path]) -> bytes:
    for file in files:
        with open(file, "rb") as handle:
            for line in handle:
                if line.strip():
                    return line
    return b""
