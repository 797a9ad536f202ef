"""Training documents on disk: a folder of text files, or JSONL with "text" or "messages" a line, read by index.

All files are read once when they are opened. That finds bad lines before training starts, and indexes the documents by byte
offset. It also gives a fingerprint that a resumed run compares. After that one document at a time is in memory.
"""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.train.data.files import data_files
from moe_jax.train.data.other_layouts import how_to_convert
from moe_jax.train.data.records import BOM, read_record

MAX_PROBLEMS = 10
"""An error lists this many bad lines or files, and counts the rest."""


@dataclass(frozen=True)
class Documents:
    """A random-access source: `documents[i]` is {"document": i, "text": str} or {"document": i, "messages": [...], ...}.

    Reading raises a ValueError that names the file where it has changed since it was opened.

    Attributes:
      format: "folder", "text" or "chat".
      files: the files, sorted; `file`, `line` (from 1), `offset` and `size` (bytes) say where each document lies.
      fingerprint: a hash of the format and of all files' contents, in order.
      stamps: each file's size in bytes and time of change in ns, as it was opened.
      begins_with_answer: bool [documents], true for conversations whose first message is the assistant's.
    """

    format: str
    files: tuple[Path, ...]
    file: np.ndarray
    line: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    fingerprint: str
    stamps: tuple[tuple[int, int], ...]
    begins_with_answer: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._read(index)
        if record is None:
            raise ValueError(
                f"the training data changed while it was in use: {self.files[self.file[index]]} is not as it was when it was "
                f"opened (document {self.where(index)}); put the old file back, or begin a new run with the new one"
            )
        return {**record, "document": int(index)}

    def _read(self, index: int) -> dict[str, Any] | None:
        """Returns the document's record; None if its file has changed."""
        number = self.file[index]
        try:
            with open(self.files[number], "rb") as handle:
                if _stamp(handle) != self.stamps[number]:
                    return None
                handle.seek(self.offset[index])
                return read_record(handle.read(self.size[index]), self.format)
        except (FileNotFoundError, ValueError):
            return None

    def where(self, index: int) -> str:
        """Returns the document's place for messages: file, line and byte offset."""
        path = self.files[self.file[index]]
        return str(path) if self.format == "folder" else f"{path}:{self.line[index]} (byte {self.offset[index]})"


def open_documents(path: str | Path, data_format: str = "auto") -> Documents:
    """Opens and checks a data set.

    Args:
      path: a .jsonl file, a folder of .jsonl files, or a folder of UTF-8 text files, where each file is a document. Folders
        are searched recursively through links; hidden files are left out. A byte order mark at a file's beginning is dropped.
      data_format: "folder", "text", "chat", or "auto": the files decide. A line of "text" is JSON with a string "text". A line
        of "chat" is JSON with a list "messages" and optionally "tools". A message has "role" and a string "content", or
        "tool_calls" without content. Files that the format leaves out are logged by name.

    Raises:
      FileNotFoundError: there is no such path, or no file in it.
      ValueError: bad lines or files, listed by file and line; not one document that has any text; or a link that leads
        nowhere. Also data that is compressed, a pipe or a device. With "auto", a folder of .jsonl files and others.
    """
    files, data_format = data_files(path, data_format)
    digest, problems = hashlib.blake2b(data_format.encode(), digest_size=16), _Problems()
    places: list[tuple[int, int, int, int, bool]] = []
    stamps = []
    for i, file in enumerate(files):
        digest.update(b"\0file\0")
        with open(file, "rb") as handle:
            stamps.append(_stamp(handle))
            offset = 0
            for line, content in enumerate([handle.read()] if data_format == "folder" else handle, start=1):
                digest.update(content)
                mark = len(BOM) if line == 1 and content.startswith(BOM) else 0
                try:
                    record = read_record(content[mark:], data_format)
                except ValueError as error:
                    place = str(file) if data_format == "folder" else f"{file}:{line}"
                    problems.add(str(error), place)
                else:
                    if record is not None:
                        answer_first = data_format == "chat" and record["messages"][0]["role"] == "assistant"
                        places.append((i, line, offset + mark, len(content) - mark, answer_first))
                offset += len(content)
    if problems.count:
        code = None if data_format == "folder" else how_to_convert(files[0])
        listed = f"bad training data ({data_format}): {problems.listed(len(places))}"
        raise ValueError(listed if code is None else f"{listed}\n{code}")
    if not places:
        raise ValueError(f"no document with any text in {Path(path).expanduser().resolve()} ({len(files)} files)")
    columns = np.asarray(places, np.int64).T
    return Documents(
        format=data_format,
        files=tuple(files),
        file=columns[0],
        line=columns[1],
        offset=columns[2],
        size=columns[3],
        fingerprint=digest.hexdigest(),
        stamps=tuple(stamps),
        begins_with_answer=columns[4].astype(bool),
    )


def _stamp(handle) -> tuple[int, int]:
    """Returns the open file's size and time of change. One system call then tells whether the file was written to."""
    status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns


class _Problems:
    """Bad lines or files, with equal problems grouped."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[str, str] = {}
        self._times: Counter[str] = Counter()

    def add(self, problem: str, place: str) -> None:
        self.count += 1
        self._first.setdefault(problem, place)
        self._times[problem] += 1

    def listed(self, num_good: int) -> str:
        """Returns one clause for each problem, with its first place in front."""
        clauses = []
        for problem, place in self._first.items():
            times = self._times[problem]
            same = f"the same in all {times}" if times == self.count + num_good else f"the same in {times - 1} more"
            clauses.append(f"{place}: {problem}" + (f" ({same})" if times > 1 else ""))
        rest = len(clauses) - MAX_PROBLEMS
        return "; ".join(clauses[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
