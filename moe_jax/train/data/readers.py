"""Readers of files and tables: each yields its rows once in order, and then reads single rows by position."""

import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BOM = "\N{ZERO WIDTH NO-BREAK SPACE}".encode()
"""A mark that some editors write at the beginning of a file; it is not part of the text."""
Stamp = tuple[int, int]
"""A file's size in bytes and modification time in ns."""


class RawRow(NamedTuple):
    """A row of a file or table before parsing.

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


@dataclass(frozen=True)
class OnDisk:
    """Base of readers whose rows are byte ranges of a file."""

    path: Path
    stamp: Stamp

    @property
    def name(self) -> str:
        """The file's path, for messages."""
        return str(self.path)

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns the bytes of the row at `offset`; None if the file has changed since it was opened."""
        try:
            with open(self.path, "rb") as handle:
                # One system call detects writes to the file.
                if _stamp(handle) != self.stamp:
                    return None
                handle.seek(offset)
                return handle.read(size)
        except FileNotFoundError:
            return None

    def place(self, line: int) -> str:
        """Returns the row's file and line as text, for messages."""
        return f"{self.path}:{line}"

    def where(self, line: int, offset: int) -> str:
        """Returns the row's file, line and byte offset as text, for messages."""
        return f"{self.place(line)} (byte {offset})"


def mark_of(content: bytes) -> int:
    """Returns the length in bytes of the file's UTF-8 byte order mark; 0 without one."""
    return len(BOM) if content.startswith(BOM) else 0


def stamp_of(path: Path) -> Stamp:
    """Returns a file's size and modification time, which reveal later changes."""
    with open(path, "rb") as handle:
        return _stamp(handle)


def _stamp(handle: BinaryIO) -> Stamp:
    status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns


def file_reader(path: Path, whole: bool) -> "Reader":
    """Opens a file by extension, or as a single document if `whole`.

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
    """Reader of a text file that is one document."""

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
    """Reader of JSON Lines: one object per line."""

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields every line as a row, including blank lines."""
        offset = 0
        with open(self.path, "rb") as handle:
            for line, content in enumerate(handle, start=1):
                digest.update(content)
                mark = mark_of(content) if line == 1 else 0
                yield RawRow(line, offset + mark, len(content) - mark, content[mark:])
                offset += len(content)


class JsonFile(OnDisk):
    """Reader of a JSON array of objects, or of concatenated objects, over any number of lines."""

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields each object as a row.

        Raises:
          ValueError: the file is not UTF-8 text, or is broken, so that the next object cannot be found.
        """
        whole = self.path.read_bytes()
        digest.update(whole)
        try:
            text = whole[mark_of(whole) :].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
        is_list = text.lstrip()[:1] == "["
        place, decoder = _Place(text, 1, 0, mark_of(whole)), json.JSONDecoder()
        place = place.moved_to(text.index("[") + 1 if is_list else 0)
        while True:
            place = place.moved_to(_after_blanks(text, place.character, "," if is_list else ""))
            if place.character == len(text) or (is_list and text[place.character] == "]"):
                break
            try:
                end = decoder.raw_decode(text, place.character)[1]
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else "a number or a nesting that is too large"
                raise ValueError(f"{self.path}:{place.line}: not JSON, so the rest cannot be read: {why}") from error
            content = text[place.character : end].encode(errors="surrogatepass")
            yield RawRow(place.line, place.byte, len(content), content)
            place = place.moved_to(end)
        if is_list and place.character == len(text):
            raise ValueError(f"{self.path}:{place.line}: the list has no end, so the file was cut; write it again")


class _Place(NamedTuple):
    """A character of `text`, with its line and its byte in the file."""

    text: str
    line: int
    character: int
    byte: int

    def moved_to(self, character: int) -> "_Place":
        passed = self.text[self.character : character]
        size = len(passed) if passed.isascii() else len(passed.encode(errors="surrogatepass"))
        return _Place(self.text, self.line + passed.count("\n"), character, self.byte + size)


def _after_blanks(text: str, start: int, comma: str) -> int:
    """Returns the index of the next character other than white space and `comma`."""
    while start < len(text) and (text[start].isspace() or text[start] == comma):
        start += 1
    return start


@dataclass(frozen=True)
class CsvFile(OnDisk):
    """Reader of comma- or tab-separated values whose first line names the columns."""

    columns: tuple[str, ...]

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields each row as a JSON object of strings.

        Raises:
          ValueError: the file is not UTF-8 text, or a quote is not closed.
        """
        whole = self.path.read_bytes()
        digest.update(whole)
        begin, end, line = 0, 0, 1

        def lines() -> Iterator[str]:
            nonlocal end
            for content in whole[mark_of(whole) :].splitlines(keepends=True):
                end += len(content)
                yield content.decode()

        table = csv.reader(lines(), delimiter=self._delimiter, strict=True)
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
                place = line, begin + mark_of(whole), end - begin
                problem = None
                if len(fields) != len(self.columns):
                    problem = f"has {len(fields)} fields, and the first line names {len(self.columns)}"
                yield RawRow(*place, b"" if problem else self._json(fields), problem)
            begin, line = end, table.line_num + 1

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns a row as JSON bytes; None if the file has changed."""
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
    """Opens a CSV or TSV file and reads its header.

    Raises:
      ValueError: the first line does not name the columns, or is not CSV.
    """
    # Texts may exceed the module's limit of 128 KiB per field.
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


@dataclass(frozen=True)
class ArrowTable:
    """Reader of a table from the library `datasets`, with rows by number.

    Attributes:
      name: the file, or the id and the split.
      path: the file; None for data of the hub.
      columns: all columns, including unused ones.
      table: the rows, {column: value} each.
    """

    name: str
    path: Path | None
    columns: tuple[str, ...]
    table: Sequence[dict[str, Any]]

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the rows as JSON objects."""
        for number, row in enumerate(self.table):
            content = as_json(row)
            digest.update(content + b"\n")
            yield RawRow(number + 1, number, len(content), content)

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns a row as JSON bytes. Never None: the table does not read its file again."""
        return as_json(self.table[offset])

    def place(self, line: int) -> str:
        """Returns the number of the row, from 1."""
        return f"{self.name} row {line}"

    def where(self, line: int, offset: int) -> str:
        """Returns the number of the row, from 1."""
        return self.place(line)


def as_json(row: dict[str, Any]) -> bytes:
    """Encodes a table row as JSON, without null entries."""
    return json.dumps(_without_nulls(row), ensure_ascii=False, default=repr).encode(errors="surrogatepass")


def _without_nulls(value: Any) -> Any:
    """Drops entries without a value: a table gives each message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


Reader = TextFile | JsonLines | JsonFile | CsvFile | ArrowTable
"""A file, or a table of a data set of the hub, which has no path. `rows` adds everything that rows depend on to its digest."""
