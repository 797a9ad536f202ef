"""Tables that the library `datasets` reads: Parquet files, and data sets of the hub, whole or as a stream."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_jax.train.data.layouts import KEYS
from moe_jax.train.data.readers import RawRow
from moe_jax.train.data.sources import DataSource
from moe_jax.train.data.streams import RowStream

FIRST_ROWS = 1000
"""Rows of a stream that are looked at when it is opened."""


@dataclass(frozen=True)
class ArrowTable:
    """Rows by number.

    Attributes:
      name: the file, or the id and the split.
      path: the file; None for data of the hub.
      columns: all columns, those that are not read too.
      table: the rows, {column: value} each.
    """

    name: str
    path: Path | None
    columns: tuple[str, ...]
    table: Sequence[dict[str, Any]]

    def rows(self, digest: "hashlib.blake2b") -> Iterator[RawRow]:
        """Yields the rows as JSON objects."""
        for number, row in enumerate(self.table):
            content = _json(row)
            digest.update(content + b"\n")
            yield RawRow(number + 1, number, len(content), content)

    def content(self, offset: int, size: int) -> bytes | None:
        """Returns a row as a JSON object. A table is not read from its file again, and so never changed."""
        return _json(self.table[offset])

    def place(self, line: int) -> str:
        """Returns the number of the row, from 1."""
        return f"{self.name} row {line}"

    def where(self, line: int, offset: int) -> str:
        """Returns the number of the row, from 1."""
        return self.place(line)


def is_saved_dataset(path: Path) -> bool:
    """Tells a folder that `save_to_disk` of the library wrote."""
    return all((path / name).is_file() for name in ("state.json", "dataset_info.json"))


def local_table(path: Path, further: Collection[str] = ()) -> ArrowTable:
    """Opens a Parquet file, or a folder that `save_to_disk` wrote, with columns of other names that are read too.

    The library keeps the rows of a file in its cache, from where they are read by number.

    Raises:
      ImportError: `datasets` is not installed.
      ValueError: the file or folder cannot be read.
    """
    datasets = _datasets(str(path))
    read, kind = (datasets.load_from_disk, "a saved data set") if path.is_dir() else (datasets.Dataset.from_parquet, "Parquet")
    try:
        return _table(str(path), path, read(str(path)), further)
    except Exception as error:  # pyarrow's and the library's own, of many kinds
        raise ValueError(f"{path}: not readable as {kind}: {_reason(error)}") from error


def hub_table(source: DataSource) -> ArrowTable:
    """Opens a data set of the hub; of a stream without `take` the first FIRST_ROWS rows.

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
        return _json({column: row[column] for column in _read(row, source.columns.values())})

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
            # Rows of a stream have all columns, and pictures in them would be decoded. A broken one would end the run.
            found = found.decode(False)
        return then(found)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no data at {source.path}: neither a file or folder here, nor a data set of the hub that can be read (a private "
            "one needs `hf auth login`)"
        ) from error
    except Exception as error:  # of many kinds, for a missing config, split or network
        raise ValueError(
            f"{source.path} is no file or folder here, and the data set of this name on the hub cannot be read "
            f"(split={split}, config={source.config}): {_reason(error)}; "
            f"others are named by --data {source.path},split=...,config=..."
        ) from error


def _table(name: str, path: Path | None, found: Any, further: Collection[str]) -> ArrowTable:
    return ArrowTable(name, path, tuple(found.column_names), found.select_columns(_read(found.column_names, further)))


def _read(columns: Iterable[str], further: Collection[str]) -> list[str]:
    """Returns the columns that some layout reads, and those in `further`. Others, such as pictures, are not even decoded.

    All columns are taken if there are none such, so that the error about the missing keys names what there is.
    """
    return [column for column in columns if column in KEYS or column in further] or list(columns)


def _json(row: dict[str, Any]) -> bytes:
    return json.dumps(_without_nulls(row), ensure_ascii=False, default=repr).encode(errors="surrogatepass")


def _without_nulls(value: Any) -> Any:
    """Drops entries without a value: a table gives each message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _datasets(name: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(f"{name} is read by the package datasets: pip install 'moe_jax[data]'")
    import datasets

    return datasets


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
