"""Rows as they stand in a file or a table, and the interface of what reads them."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

BOM = "\N{ZERO WIDTH NO-BREAK SPACE}".encode()
"""A mark that some editors write at the beginning of a file; no part of the text."""
Stamp = tuple[int, int]
"""A file's size in bytes and time of change in ns."""


class RawRow(NamedTuple):
    """A row in a file.

    Attributes:
      line: the line that it begins in, from 1; for tables the number of the row, from 1.
      offset: its first byte; for tables the number of the row, from 0.
      size: its length in bytes.
      content: the row as JSON, or the whole text of a text file.
      problem: the reason why there is no content; None otherwise.
    """

    line: int
    offset: int
    size: int
    content: bytes
    problem: str | None = None


class Reader(Protocol):
    """A file, or a table of a data set of the hub, which has no path."""

    @property
    def name(self) -> str:
        """The name for messages."""
        ...

    @property
    def path(self) -> Path | None:
        """The file on this machine."""
        ...

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields all rows, and adds all that they depend on to `digest`."""
        ...

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns the content of the row at this place; None if the file is not as it was when it was opened."""
        ...

    def place(self, line: int) -> str:
        """Returns the place of a row for messages."""
        ...

    def where(self, line: int, offset: int) -> str:
        """Returns the place with the row's first byte, where rows have one."""
        ...


@dataclass(frozen=True)
class OnDisk:
    """A file whose rows are byte ranges."""

    path: Path
    stamp: Stamp

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns the bytes of a row; None if the file has changed."""
        try:
            with open(self.path, "rb") as handle:
                # One system call tells whether the file was written to.
                if _stamp(handle) != self.stamp:
                    return None
                handle.seek(offset)
                return handle.read(size)
        except FileNotFoundError:
            return None

    def place(self, line: int) -> str:
        """Returns file and line."""
        return f"{self.path}:{line}"

    def where(self, line: int, offset: int) -> str:
        """Returns file, line and byte offset."""
        return f"{self.place(line)} (byte {offset})"


def mark_of(content: bytes) -> int:
    """Counts the bytes of a byte order mark at the beginning of a file."""
    return len(BOM) if content.startswith(BOM) else 0


def stamp_of(path: Path) -> Stamp:
    """Returns a file's size and time of change."""
    with open(path, "rb") as handle:
        return _stamp(handle)


def _stamp(handle: BinaryIO) -> Stamp:
    status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns
