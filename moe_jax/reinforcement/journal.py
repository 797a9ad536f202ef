"""The journal of a run: every scored group on disk, so that a killed run neither draws nor scores it again.

A step is a folder with one file, `groups.jsonl`. A group is one line: a checksum, and the group as JSON. A line is on the disk
when `append` returns. A kill can tear only the last line, which is dropped: its group is drawn again.
"""

import base64
import hashlib
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.reinforcement.samples import Group, Sample

FILE = "groups.jsonl"
_ARRAY = "base64"
"""Key of an array's bytes; an object with it is an array."""


class Journal:
    """Groups of a run, by step and key.

    Args:
      folder: the journal's folder; it is made with the first group.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self._mended = set[int]()

    def append(self, step: int, group: Group) -> None:
        """Writes a group, and returns when it is on the disk. The experts of its samples are not stored."""
        file = self._file(step)
        if step not in self._mended:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            # After a torn line the next group would be lost too.
            os.truncate(file, sum(map(len, _lines(file))))
        self._mended.discard(step)
        content = json.dumps(_plain(group), default=_json).encode()
        with open(file, "ab") as handle:
            handle.write(_checksum(content) + b" " + content + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
        self._mended.add(step)

    def groups(self, step: int) -> dict[int, Group]:
        """Returns the whole groups of a step, by key; empty for a step without any.

        Raises:
          ValueError: a line before the last one is damaged; the message names file and line.
        """
        file = self._file(step)
        found = [_group(line) for line in _lines(file)] if file.exists() else []
        return {group.key: group for group in found}

    def drop(self, *, before: int) -> None:
        """Removes all steps before a step, because a complete checkpoint of that step has made them unnecessary."""
        for folder in self.folder.glob("[0-9]*"):
            if int(folder.name) < before:
                shutil.rmtree(folder)

    def _file(self, step: int) -> Path:
        return self.folder / f"{step:08d}" / FILE


def _lines(file: Path) -> list[bytes]:
    """Returns the whole lines of a file; a torn last line is left out."""
    lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        checksum, _, content = line.rstrip(b"\n").partition(b" ")
        if line.endswith(b"\n") and checksum == _checksum(content):
            continue
        if number == len(lines):
            return lines[:-1]
        raise ValueError(
            f"{file}:{number} is damaged: its checksum is wrong, and it is not the last line. Remove the file to draw and "
            "score the step's groups again"
        )
    return lines


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


def _plain(record: Group | Sample) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record) if each.name != "expert_ids"}


def _json(value: Any) -> Any:
    """Returns a value that JSON does not know as one that it does; arrays keep their bits."""
    if isinstance(value, Sample):
        return _plain(value)
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, _ARRAY: base64.b64encode(value.tobytes()).decode()}
    return value.item() if isinstance(value, np.generic) else repr(value)


def _group(line: bytes) -> Group:
    record = json.loads(line.partition(b" ")[2], object_hook=_array)
    return Group(**record | {"samples": tuple(Sample(**sample) for sample in record["samples"])})


def _array(value: dict[str, Any]) -> Any:
    if value.keys() != {"dtype", "shape", _ARRAY}:
        return value
    return np.frombuffer(base64.b64decode(value[_ARRAY]), value["dtype"]).reshape(value["shape"]).copy()
