"""A table of values between commas or tabs."""

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_jax.train.data.rows import OnDisk, RawRow, mark_of, stamp_of


@dataclass(frozen=True)
class CsvFile(OnDisk):
    """A table of values between commas, or tabs, whose first line names the columns."""

    columns: tuple[str, ...]

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields each row as a JSON object of strings.

        Raises:
          ValueError: the file is no UTF-8 text, or a quote is not closed.
        """
        whole = self.path.read_bytes()
        digest.update(whole)
        lines = _CountedLines(whole[mark_of(whole) :])
        table = csv.reader(lines, delimiter=self._delimiter, strict=True)
        begin, line = 0, 1
        while True:
            try:
                fields = next(table, None)
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.path}:{line}: not UTF-8 text: {error.reason}; convert it with iconv") from error
            except csv.Error as error:
                raise ValueError(f"{self.path}:{line}: not CSV, so the rest cannot be read: {error}") from error
            if fields is None:
                return
            if fields and begin > 0:
                place = line, begin + mark_of(whole), lines.byte - begin
                problem = None
                if len(fields) != len(self.columns):
                    problem = f"has {len(fields)} fields, and the first line names {len(self.columns)}"
                yield RawRow(*place, b"" if problem else self._json(fields), problem)
            begin, line = lines.byte, table.line_num + 1

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns a row as a JSON object; None if the file has changed."""
        found = super().content(offset, size)
        if found is None:
            return None
        return self._json(next(csv.reader(io.StringIO(found.decode(), newline=""), delimiter=self._delimiter, strict=True)))

    @property
    def _delimiter(self) -> str:
        return "\t" if self.path.suffix.lower() == ".tsv" else ","

    def _json(self, fields: list[str]) -> bytes:
        return json.dumps(dict(zip(self.columns, fields, strict=True)), ensure_ascii=False).encode()


def csv_file(path: Path) -> CsvFile:
    """Opens a table and reads the names of its columns.

    Raises:
      ValueError: the first line does not name the columns, or is no CSV.
    """
    # Texts are longer than the module's limit of 128 KiB a field.
    csv.field_size_limit(sys.maxsize)
    made = CsvFile(path, stamp_of(path), ())
    with open(path, "rb") as handle:
        try:
            names = next(csv.reader((line.decode("utf-8-sig") for line in handle), delimiter=made._delimiter), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path}:1: not CSV in UTF-8: {error}") from error
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path}:1: the first line must name the columns, each by another name; it is {names!r:.200}")
    return CsvFile(path, made.stamp, tuple(names))


class _CountedLines:
    """The lines of a file's bytes as text; `byte` stands behind the last line that was taken."""

    def __init__(self, whole: bytes):
        self._lines, self.byte = iter(whole.splitlines(keepends=True)), 0

    def __iter__(self) -> "_CountedLines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.byte += len(line)
        return line.decode()
