"""Columns under other names: a file's rows with the names that a user gives for them."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_jax.train.data.rows import RawRow, Reader


def renamed(row: Any, names: Mapping[str, str]) -> Any:
    """Returns a row with the columns `names` ({key of a layout: column}) under their keys, as far as it has them."""
    if not isinstance(row, dict) or not set(names.values()) & row.keys():
        return row
    others = {column: value for column, value in row.items() if column not in names.values()}
    return others | {key: row[column] for key, column in names.items() if column in row}


def check_columns(names: Mapping[str, str], rows: Iterable[Collection[str]]) -> None:
    """Refuses a column that no row has: a mistyped name. Rows are read until all columns were seen.

    Args:
      names: {key of a layout: column}.
      rows: the columns of each row.

    Raises:
      ValueError: the message names the column, and those that there are. It is a clause that follows the name of the source.
    """
    missing, found = dict.fromkeys(names.values()), dict[str, None]()
    for row in rows:
        found |= dict.fromkeys(row)
        missing = {column: None for column in missing if column not in row}
        if not missing:
            return
    if found:
        columns = " and no ".join(map(repr, missing))
        raise ValueError(f"no column {columns}; it has {', '.join(found)}")


@dataclass(frozen=True)
class Renamed:
    """A reader whose rows have the keys of a layout in place of their own columns.

    Attributes:
      reader: the reader of the rows as they are.
      names: {key of a layout: column}.
    """

    reader: Reader
    names: Mapping[str, str]

    @property
    def name(self) -> str:
        """The reader's name."""
        return self.reader.name

    @property
    def path(self) -> Path | None:
        """The reader's file."""
        return self.reader.path

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the rows with their new keys, and adds the names to the digest."""
        digest.update(json.dumps(dict(self.names), sort_keys=True).encode())
        for row in self.reader.rows(digest):
            yield row._replace(content=_with_names(row.content, self.names))

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns a row with its new keys; None if the file has changed."""
        content = self.reader.content(offset, size)
        return None if content is None else _with_names(content, self.names)

    def place(self, line: int) -> str:
        """Returns the reader's place."""
        return self.reader.place(line)

    def where(self, line: int, offset: int) -> str:
        """Returns the reader's place with the row's first byte."""
        return self.reader.where(line, offset)


def _with_names(content: bytes, names: Mapping[str, str]) -> bytes:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        # The error about the row names what is wrong with it.
        return content
    made = renamed(row, names)
    return content if made is row else json.dumps(made).encode()
