"""The sources of a data set as a user names them: a file, a folder or a hub id, with options after commas."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_jax.train.data.layouts import KEYS, LAYOUTS, NO_COLUMNS, layout_of, renamed, unread_keys
from moe_jax.train.data.readers import csv_file

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class DataSource:
    """One source of a data set, with its options, as parsed from the command line.

    Attributes:
      path: a file, a folder, or the id of a data set of the hub.
      weight: its share of the learned documents, relative to the other sources' weights; None: its share of all documents.
      format: as `data_format`; None: the format of all sources.
      split, config, revision: identify a data set of the hub; None: the split "train", its only config, its newest revision.
      columns: {key of a layout: its column}, for rows with other names.
      take: number of first rows to read from a data set of the hub, as a stream; None: all rows.
      stream: read the rows of a data set of the hub in order as they arrive, instead of downloading all of them first.
    """

    path: str
    weight: float | None = None
    format: str | None = None
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    take: int | None = None
    stream: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_hub(self) -> bool:
        """True if the path looks like a hub id and does not exist locally."""
        path = Path(self.path).expanduser()
        return bool(HUB_ID.fullmatch(self.path)) and not path.exists() and not is_table_or_lines(path)


def sources(data: str | Path | Sequence[str | Path]) -> list[DataSource]:
    """Parses sources such as `chats.jsonl`, `chats.jsonl,weight=0.7` or `owner/name,split=train,take=1000`.

    An existing path is used as it is, commas included.

    Raises:
      ValueError: an unknown option or a wrong value; only some sources have a weight; a stream is not the only source, or has
        `take`.
    """
    found = [_source(str(text)) for text in ([data] if isinstance(data, str | Path) else data)]
    if not found:
        raise ValueError("no data: give a file, a folder or the id of a data set of the hub")
    stream = next((source for source in found if source.stream), None)
    if stream is not None and (len(found) > 1 or stream.take is not None):
        beside = f"take={stream.take}" if stream.take is not None else "other sources"
        raise ValueError(
            f"{stream.path},stream=true reads all rows in their order, and cannot be combined with {beside}: leave one of both "
            "out; take=N alone reads the first N rows as a stream, and these can be mixed"
        )
    weighted = [source for source in found if source.weight is not None]
    if weighted and (len(found) == 1 or len(weighted) < len(found)):
        without = next((source.path for source in found if source.weight is None), None)
        raise ValueError(
            f"{found[0].path} is the only source, so its weight has no effect; leave it out"
            if without is None
            else f"{without} has no weight, and {weighted[0].path} has one; give all sources a weight, or none"
        )
    return found


def _source(text: str) -> DataSource:
    if Path(text).expanduser().exists():
        return DataSource(text)
    path, *options = text.split(",")
    known = [each.name for each in fields(DataSource) if each.name not in ("path", "columns")]
    values: dict[str, Any] = {}
    columns: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in (*known, *KEYS) or not equals or not value or name in values or name in columns:
            raise ValueError(
                f"data {text!r}: {option!r} is no option; options are {', '.join(f'{name}=...' for name in known)}, and keys "
                "of layouts such as prompt=COLUMN, each once"
            )
        if name in known:
            values[name] = _value(text, name, value)
        else:
            columns[name] = value
    source = DataSource(path, **values, columns=columns)
    if source.format is not None and source.format not in FORMATS:
        raise ValueError(f"data {text!r}: format must be one of {', '.join(FORMATS)}; got {source.format!r}")
    given = [name for name in ("split", "config", "revision", "take", "stream") if name in values]
    if given and not source.on_hub:
        raise ValueError(f"data {text!r}: {given[0]} is for data sets of the hub, and {path!r} is no id such as owner/name")
    return source


def _value(text: str, name: str, value: str) -> str | float | int | bool:
    if name == "stream":
        if value != "true":
            raise ValueError(f"data {text!r}: stream must be true, or left out; got {value!r}")
        return True
    if name not in ("weight", "take"):
        return value
    try:
        number = int(value) if name == "take" else float(value)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        what = "a number greater than 0" if name == "weight" else "an integer of at least 1"
        raise ValueError(f"data {text!r}: {name} must be {what}; got {value!r}")
    return number


FORMATS = ("auto", *LAYOUTS, "folder")
COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""Endings of compressed files, each with the command that unpacks one."""
ROWS = (".jsonl", ".ndjson", ".parquet")
"""Endings of files that always hold rows."""
PERHAPS_ROWS = (".json", ".csv", ".tsv")
"""Endings of files that hold rows or a text: the first row's keys decide."""
MAX_NAMES = 10
"""A message names this many files at most, and counts the rest."""
_HEAD = 1 << 20
_logger = logging.getLogger(__name__)


def data_files(path: str | Path, data_format: str, columns: Mapping[str, str] = NO_COLUMNS) -> tuple[list[Path], bool]:
    """Returns the sorted files of a data set, and True if each file is one document.

    Args:
      columns: {key of a layout: column}, as in `DataSource`.

    Raises:
      FileNotFoundError: there is no such path, or no file in it.
      ValueError: the format is unknown, or does not fit the files; a link is dangling; or `path` is a pipe or a device, or
        compressed. Also, with "auto", a folder that mixes files of rows with others.
    """
    path = Path(path).expanduser()
    if data_format not in FORMATS:
        raise ValueError(f"data_format must be one of {', '.join(FORMATS)}; got {data_format!r}")
    if not path.exists():
        raise FileNotFoundError(
            f"no data at {path.resolve()}: give a file of rows ({', '.join((*ROWS, *PERHAPS_ROWS))}), a folder of such "
            "files or of texts, or the id of a data set of the hub, owner/name"
        )
    if not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"the data at {path} is a pipe or a device, and documents are read in any order; write them to a regular file first"
        )
    path = path.resolve()
    files = [path] if path.is_file() else _files_below(path, data_format, columns)
    _check_not_compressed(files)
    whole = data_format == "folder" or (data_format == "auto" and path.is_dir() and _are_texts(path, files, columns))
    if path.is_file() and (whole or not is_table_or_lines(path)):
        raise ValueError(
            f"{path} is a single file and no file of rows: give a {', '.join((*ROWS, *PERHAPS_ROWS))} file, or a folder of "
            "text files"
        )
    return files, whole


def row_files(path: str | Path) -> list[Path]:
    """Returns a file of rows, or all such files of a folder, sorted; other files are logged as ignored.

    Raises:
      FileNotFoundError: there is no such path, or no file of rows in it.
      ValueError: a file of another kind, compressed files, or dangling links.
    """
    path = Path(path).expanduser().resolve()
    endings = " or ".join((*ROWS, *PERHAPS_ROWS))
    if not path.exists():
        raise FileNotFoundError(f"no data at {path}: give a file of rows ({endings}), or a folder of some")
    found = [path] if path.is_file() else _files_below(path, "folder", NO_COLUMNS)
    _check_not_compressed(found)
    files = [file for file in found if is_table_or_lines(file)]
    if not files:
        error = ValueError if path.is_file() else FileNotFoundError
        raise error(f"{path} is no file of rows, and holds none: rows are in {endings} files")
    if left_out := sorted(set(found) - set(files)):
        _logger.warning("left out of the data: %s", named(left_out))
    return files


def is_table_or_lines(file: Path) -> bool:
    """Returns True if the file's extension is one for rows (JSON, CSV, Parquet), in any case."""
    return file.suffix.lower() in (*ROWS, *PERHAPS_ROWS)


def named(paths: Iterable[Path]) -> str:
    """Joins paths for a message, truncated to MAX_NAMES."""
    names = [str(path) for path in paths]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _files_below(folder: Path, data_format: str, columns: Mapping[str, str]) -> list[Path]:
    # Sorted by their path in the folder, links included: the fingerprint of a data set follows this order.
    found = sorted(_entries(folder, (folder,)))
    if broken := [path for path in found if not path.exists()]:
        raise ValueError(f"links in {folder} that lead nowhere: {named(broken)}; mend or remove them")
    files = [path for path in found if path.is_file()]
    of_rows = data_format not in ("auto", "folder")
    if of_rows:
        files = [path for path in files if _holds_rows(path, data_format, columns)]
    if not files:
        kind = f"{' or '.join((*ROWS, *PERHAPS_ROWS))} files with rows of {data_format}" if of_rows else "files"
        raise FileNotFoundError(f"no {kind} in the folder {folder}")
    if left_out := sorted(set(found) - set(files)):
        _logger.warning("left out of the training data: %s", named(left_out))
    return files


def _entries(folder: Path, inside: tuple[Path, ...]) -> Iterator[Path]:
    """Yields the paths below `folder`, except folders and hidden files. Also yields a link back to a folder in `inside`."""
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


def _are_texts(folder: Path, files: list[Path], columns: Mapping[str, str]) -> bool:
    """Returns True if each of a folder's files is a document as a whole, False for files of rows.

    Raises:
      ValueError: some files always hold rows, and others hold none.
    """
    rows = [file for file in files if _holds_rows(file, "auto", columns)]
    always = [file for file in rows if file.suffix.lower() in ROWS]
    if len(rows) == len(files):
        return False
    if always:
        other = min(set(files) - set(rows))
        raise ValueError(
            f"{folder} holds {always[0].suffix} files and others, such as {other.name}: data_format chat, text or "
            "another layout reads only the files of rows, and folder reads all files"
        )
    return True


def _holds_rows(file: Path, layout: str, columns: Mapping[str, str]) -> bool:
    ending = file.suffix.lower()
    if ending not in PERHAPS_ROWS:
        return ending in ROWS
    row = renamed(_first_row(file), columns)
    if layout == "auto":
        return layout_of(row) is not None
    return isinstance(row, dict) and unread_keys(row, layout) != set(row)


def _first_row(file: Path) -> Any:
    """Returns the first row of a .json file or a table; for a table only the keys matter. None if there is no row."""
    try:
        if file.suffix.lower() != ".json":
            return dict.fromkeys(csv_file(file).columns, "")
        with open(file, "rb") as handle:
            head = handle.read(_HEAD).decode("utf-8-sig", errors="replace")
        return json.JSONDecoder().raw_decode(head, head.index("{"))[0]
    except (ValueError, RecursionError):
        return None
