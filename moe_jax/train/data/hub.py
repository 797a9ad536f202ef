"""Tables that the library `datasets` reads: Parquet files, and data sets of the hub, whole or as a stream.

A stream's rows are read in order, without a prior download. Its first rows are inspected when it is opened: they decide the
layout, and are measured before a run.
"""

import copy
import importlib.util
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.train.data.documents import BAD, Documents
from moe_jax.train.data.layouts import KEYS, read_record
from moe_jax.train.data.readers import ArrowTable, as_json
from moe_jax.train.data.sources import DataSource

KEPT_ROWS = 4096
"""Rows kept in memory, so that the first batch can be built twice without reading them twice."""
MARKED_ROWS = 256
"""Number of rows between marks: a resumed run skips fewer rows than this."""
KEPT_MARKS = 1024
"""Number of marks kept in memory. Prefetched rows must not evict the marks that a checkpoint needs."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Streamed(Documents):
    """A stream of documents, accessed by row number from 0; it restarts at its end. Other fields describe the first rows.

    A chat counts as weighted, because a later row may have weights.

    Attributes:
      first: the documents of the first rows.
      rows: all rows.
    """

    first: Documents = field(kw_only=True)
    rows: "RowStream" = field(kw_only=True)
    is_stream = True

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Any]:
        content, layout = self.rows[int(index)], self.layouts[0]
        try:
            record = read_record(content, layout, self.learned_answers, self.columns[0])
        except ValueError as error:
            record = {BAD: str(error)}
        return {**({BAD: ""} if record is None else record), "document": int(index)}

    @property
    def surveyed(self) -> Documents:
        """The documents in the stream's first rows, which are measured instead of the whole stream."""
        return self.first

    def where(self, index: int) -> str:
        """Returns the row's number from 1 as text for error messages; numbers keep counting after a restart."""
        return self.readers[0].place(int(index) + 1)


class Mark(NamedTuple):
    """A position in a stream: the number of a row, and the data set's state before it, as JSON values."""

    row: int
    state: dict[str, Any]


class RowStream:
    """Access to a stream's rows by number, with a cache of the newest KEPT_ROWS; earlier rows are read again.

    Args:
      data: a `datasets.IterableDataset`.
      content: returns a row's content.

    Attributes:
      last_round: the row numbers of the last complete pass through the stream; None before the first.
    """

    def __init__(self, name: str, data: Any, content: Callable[[dict[str, Any]], bytes]):
        self._name, self._data, self._content = name, data, content
        self._kept: deque[bytes] = deque(maxlen=KEPT_ROWS)
        self._marks: deque[Mark] = deque([], maxlen=KEPT_MARKS)
        self._beginning = Mark(0, copy.deepcopy(data.state_dict()))
        self._coming: Iterator[bytes] | None = None
        self._next = 0
        self.last_round: range | None = None
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> bytes:
        with self._lock:
            if self._coming is None or number < self._next - len(self._kept):
                self._kept.clear()
                self._coming, self._next = self._from(number), number
            while self._next <= number:
                try:
                    self._kept.append(next(self._coming))
                except Exception as error:  # many kinds of errors, for a failing network or file
                    self._coming = None
                    raise ValueError(f"{self._name}: row {self._next + 1} cannot be read: {_reason(error)}") from error
                self._next += 1
            return self._kept[number - self._next]

    def mark_before(self, number: int) -> Mark:
        """Returns the last resumable position at or before a row, or the beginning of the stream."""
        before = [mark for mark in list(self._marks) if mark.row <= number]
        return max(before, default=self._beginning, key=lambda mark: mark.row)

    def add_mark(self, mark: Mark) -> None:
        """Adds a resumable position that another reader of the same stream recorded."""
        self._marks.append(mark)

    def _from(self, start: int) -> Iterator[bytes]:
        """Yields the contents from row `start` on, pass after pass. Rows between the last mark and `start` are skipped."""
        number, state = self.mark_before(start)
        while True:
            # An iteration modifies the state that it started from, and copies of a data set share that state.
            self._data.load_state_dict(copy.deepcopy(state))
            began = number
            for row in self._data:
                number += 1
                if number % MARKED_ROWS == 0:
                    self._marks.append(Mark(number, copy.deepcopy(self._data.state_dict())))
                if number > start:
                    yield self._content(row)
            if state == self._beginning.state:
                if number == began:
                    raise ValueError("there are no rows")
                self.last_round = range(began, number)
            if number >= start:
                _logger.warning("%s has ended, and begins again", self._name)
            state = self._beginning.state


FIRST_ROWS = 1000
"""Number of a stream's rows that are inspected when it is opened."""


def is_saved_dataset(path: Path) -> bool:
    """Returns True if the folder was written by `save_to_disk` of the library `datasets`."""
    return all((path / name).is_file() for name in ("state.json", "dataset_info.json"))


def local_table(path: Path, further: Collection[str] | None = ()) -> ArrowTable:
    """Opens a Parquet file or a `save_to_disk` folder as a table; `further` names additional columns, None all.

    The library stores a file's rows in its cache and reads them from there by number.

    Raises:
      ImportError: `datasets` is not installed.
      ValueError: the file or folder cannot be read.
    """
    datasets = _datasets(str(path))
    read, kind = (datasets.load_from_disk, "a saved data set") if path.is_dir() else (datasets.Dataset.from_parquet, "Parquet")
    try:
        return _table(str(path), path, read(str(path)), further)
    except Exception as error:  # many kinds of errors of pyarrow and the library
        raise ValueError(f"{path}: not readable as {kind}: {_reason(error)}") from error


def hub_table(source: DataSource) -> ArrowTable:
    """Opens a data set of the hub as a table; for a stream without `take`, only its first FIRST_ROWS rows.

    Raises:
      ImportError: `datasets` is not installed.
      FileNotFoundError: there is no such data set.
      ValueError: the data set cannot be read, or has no such split or config.
    """
    take = FIRST_ROWS if source.stream else source.take

    def opened(found: Any) -> ArrowTable:
        if take is None:
            return _table(_name(source), None, found, source.columns.values())
        columns: dict[str, None] = {}
        rows = []
        for row in found.take(take):
            columns |= dict.fromkeys(row)
            rows.append({column: row[column] for column in _read(row, source.columns.values())})
        return ArrowTable(_name(source), None, tuple(columns), rows)

    return _loaded(source, streaming=take is not None, then=opened)


def hub_rows(source: DataSource) -> RowStream:
    """Opens a data set of the hub as a stream of all its rows; raises as `hub_table`."""

    def content(row: dict[str, Any]) -> bytes:
        return as_json({column: row[column] for column in _read(row, source.columns.values())})

    return _loaded(source, streaming=True, then=lambda found: RowStream(_name(source), found, content))


def _name(source: DataSource) -> str:
    split = source.split or "train"
    return f"{source.path} ({split if source.config is None else f'{source.config}, {split}'})"


def _loaded[T](source: DataSource, *, streaming: bool, then: Callable[[Any], T]) -> T:
    """Returns `then` of a data set of the hub; an error of either names the data set."""
    datasets = _datasets(f"{source.path}, which is no file or folder here but may be a data set of the hub,")
    split = source.split or "train"
    options = dict(name=source.config, split=split, revision=source.revision, streaming=streaming)
    try:
        found = datasets.load_dataset(source.path, **options)
        if streaming and found.features is not None:
            # Rows of a stream have all columns, and pictures in them would be decoded; a broken one would end the run.
            found = found.decode(False)
        return then(found)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no data at {source.path}: neither a file or folder here, nor a data set of the hub that can be read (a private "
            "one needs `hf auth login`)"
        ) from error
    except Exception as error:  # many kinds of errors, for a missing config, split or network
        raise ValueError(
            f"{source.path} is no file or folder here, and the data set of this name on the hub cannot be read "
            f"(split={split}, config={source.config}): {_reason(error)}; "
            f"others are named by --data {source.path},split=...,config=..."
        ) from error


def _table(name: str, path: Path | None, found: Any, further: Collection[str] | None) -> ArrowTable:
    return ArrowTable(name, path, tuple(found.column_names), found.select_columns(_read(found.column_names, further)))


def _read(columns: Iterable[str], further: Collection[str] | None) -> list[str]:
    """Returns the columns that some layout or `further` names. Others, such as pictures, are not decoded.

    Returns all columns if there are none, so that the error about missing keys can list them, or if `further` is None.
    """
    return [column for column in columns if further is None or column in KEYS or column in further] or list(columns)


def _datasets(name: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(f"{name} is read by the package datasets: pip install 'moe_jax[data]'")
    import datasets

    return datasets


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
