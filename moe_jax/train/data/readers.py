"""Readers of files: each gives its rows once in order, and again one by one by their place."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from moe_jax.train.data.csv_file import CsvFile, csv_file
from moe_jax.train.data.json_file import JsonFile
from moe_jax.train.data.rows import OnDisk, RawRow, mark_of, stamp_of


def file_reader(path: Path, whole: bool) -> "TextFile | JsonLines | JsonFile | CsvFile":
    """Opens a file that is read by byte offset: as one text if `whole`, otherwise by its name's ending.

    Raises:
      ValueError: a table without a line of column names.
    """
    if whole:
        return TextFile(path, stamp_of(path))
    match path.suffix.lower():
        case ".json":
            return JsonFile(path, stamp_of(path))
        case ".csv" | ".tsv":
            return csv_file(path)
        case _:
            return JsonLines(path, stamp_of(path))


class TextFile(OnDisk):
    """A file that is one document."""

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the whole file, without a byte order mark."""
        whole = self.path.read_bytes()
        digest.update(whole)
        mark = mark_of(whole)
        yield RawRow(1, mark, len(whole) - mark, whole[mark:])

    def place(self, line: int) -> str:
        """Returns the file."""
        return str(self.path)

    def where(self, line: int, offset: int) -> str:
        """Returns the file."""
        return str(self.path)


class JsonLines(OnDisk):
    """A file of a JSON object a line."""

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the lines, empty ones too."""
        offset = 0
        with open(self.path, "rb") as handle:
            for line, content in enumerate(handle, start=1):
                digest.update(content)
                mark = mark_of(content) if line == 1 else 0
                yield RawRow(line, offset + mark, len(content) - mark, content[mark:])
                offset += len(content)
