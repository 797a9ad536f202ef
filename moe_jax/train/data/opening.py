"""Opens data sets: reads all rows of their sources once, and checks each of them."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_jax.train.data.chat import has_weights
from moe_jax.train.data.documents import Documents, SourcePart, joined
from moe_jax.train.data.files import data_files, row_files
from moe_jax.train.data.hub import ArrowTable, hub_rows, hub_table, is_saved_dataset, parquet_table, saved_table
from moe_jax.train.data.layouts import CHATS, LAYOUTS, layout_of, no_layout, unread_keys
from moe_jax.train.data.problems import Problems
from moe_jax.train.data.readers import file_reader
from moe_jax.train.data.reasoning import EMPTY_THINKING
from moe_jax.train.data.records import LEARNED_ANSWERS, read_row, record_of
from moe_jax.train.data.renaming import Renamed, check_columns, renamed
from moe_jax.train.data.rows import RawRow, Reader
from moe_jax.train.data.sources import DataSource, sources
from moe_jax.train.data.streams import streamed
from moe_jax.train.data.turns import further_keys


class _Found(NamedTuple):
    """The result of reading all rows of a source."""

    places: "list[_Place]"
    layouts: list[str | None]
    problems: Problems
    unread: tuple[str, ...]
    fingerprint: str


class _Place(NamedTuple):
    """The place of a document, whether it begins with an answer, and whether answers have weights other than 0 and 1."""

    file: int
    line: int
    offset: int
    size: int
    answer_first: bool
    weighted: bool


def open_documents(
    data: str | Path | Sequence[str | Path],
    data_format: str = "auto",
    *,
    learned_answers: str = "all",
    empty_thinking: str = "learn",
    skip_bad: bool = False,
) -> Documents:
    """Opens and checks a data set. Of a stream (`owner/name,stream=true`) the first rows are checked, and later ones when read.

    Args:
      data: a source, or several of them. A source is a file of rows (.jsonl, .ndjson, .json, .csv, .tsv, .parquet), or a folder
        of such files. Or a folder of UTF-8 text files, where each file is a document. Or the id of a data set of the hub.
        Options stand behind commas (`DataSource`): `chats.jsonl,weight=0.7`, `owner/name,split=train,take=1000`. Folders are
        searched recursively through links; hidden files are left out. A byte order mark at a file's beginning is dropped.
      data_format: "folder", or a layout of rows ("chat", "text", "sharegpt", "alpaca", "pairs", "continuation"), or "auto".
        With "auto" a file's first row that has known keys decides. Files that the format leaves out are logged by name.
      learned_answers: "all", or "last": of each conversation only the last turn is learned.
      empty_thinking: "learn", or "mask": the empty think block that a template writes into an answer without reasoning is not
        learned.
      skip_bad: leave bad rows or files out, and count them, instead of raising.

    Raises:
      FileNotFoundError: there is no such path or data set, or no file in it.
      ImportError: Parquet or a data set of the hub, and `datasets` is not installed.
      ValueError: bad rows or files, listed by file and line; not one document that has any text; or a link that leads
        nowhere. Also data that is compressed, a pipe or a device. With "auto", a folder of files of rows and others.
    """
    if learned_answers not in LEARNED_ANSWERS:
        raise ValueError(f"learned_answers must be one of {', '.join(LEARNED_ANSWERS)}; got {learned_answers!r}")
    if empty_thinking not in EMPTY_THINKING:
        raise ValueError(f"empty_thinking must be one of {', '.join(EMPTY_THINKING)}; got {empty_thinking!r}")
    found = sources(data)
    opened = [_opened(source, source.format or data_format, learned_answers, skip_bad) for source in found]
    if empty_thinking == "mask":
        opened = [replace(each, empty_thinking="mask", fingerprint=f"{each.fingerprint} mask") for each in opened]
    if found[0].stream:
        return streamed(opened[0], hub_rows(found[0]), found[0].columns)
    if len(opened) == 1:
        return opened[0]
    digest = hashlib.blake2b(b"several", digest_size=16)
    for source, documents in zip(found, opened, strict=True):
        digest.update(f"\0{documents.fingerprint} {source.weight}".encode())
    return joined(opened, digest.hexdigest())


def _opened(source: DataSource, data_format: str, learned_answers: str, skip_bad: bool) -> Documents:
    readers, whole = _readers(source, data_format)
    layouts = _layouts(readers, "folder" if whole else data_format)
    # Stored runs have the fingerprint of one format alone.
    kinds = layouts[0] if len(set(layouts)) == 1 else ",".join(map(str, layouts))
    kinds = str(kinds) + (" last" if learned_answers == "last" else "") + (" stream" if source.stream else "")
    digest, problems = hashlib.blake2b(kinds.encode(), digest_size=16), Problems()
    places: list[_Place] = []
    unread: Counter[str] = Counter()
    for i, (reader, layout) in enumerate(zip(readers, layouts, strict=True)):
        digest.update(b"\0file\0")
        for row in reader.rows(digest):
            try:
                place = _place(i, row, layout, learned_answers, unread)
            except ValueError as error:
                problems.add(str(error), reader.place(row.line))
            else:
                places += [] if place is None else [place]
        if layout in LAYOUTS:
            unread.update(unread_keys(_columns(reader), layout))
    listed = problems.listed(len(places))
    if listed and not (skip_bad and places):
        how_to_skip = "; --skip-bad-documents leaves them out, and counts them" if places else ""
        what = f"bad training data ({kinds}): " if any(layouts) else "bad training data: "
        raise ValueError(f"{what}{listed}{how_to_skip}")
    if not places:
        raise ValueError(f"no document with any text in {source.path} ({len(readers)} files)")
    found = _Found(places, layouts, problems, tuple(sorted(unread)), digest.hexdigest())
    return _documents(source, readers, found, learned_answers)


def row_readers(path: str | Path, further: Collection[str]) -> list[Reader]:
    """Opens a file of rows, a folder of such files, or a folder that `save_to_disk` of the library `datasets` wrote.

    Args:
      further: columns of tables that are read beside those of the layouts.

    Raises:
      FileNotFoundError, ImportError, ValueError: as `open_documents`.
    """
    folder = Path(path).expanduser()
    if is_saved_dataset(folder):
        return [saved_table(folder.resolve(), further)]
    return [reader_of_rows(file, further) for file in row_files(folder)]


def reader_of_rows(file: Path, further: Collection[str]) -> Reader:
    """Opens a file of rows by its name's ending."""
    return parquet_table(file, further) if file.suffix.lower() == ".parquet" else file_reader(file, whole=False)


def _readers(source: DataSource, data_format: str) -> tuple[list[Reader], bool]:
    """Returns the readers of a source, with its columns renamed, and True if each file is a document as a whole."""
    readers, whole = _own_readers(source, data_format)
    if source.columns and whole:
        raise ValueError(f"{source.path} holds texts, and {', '.join(source.columns)} name columns of rows; leave them out")
    if not source.columns:
        return readers, whole
    try:
        check_columns(source.columns, (keys for reader in readers for keys in _keys_of_rows(reader)))
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    return [Renamed(reader, source.columns) for reader in readers], whole


def _keys_of_rows(reader: Reader) -> Iterator[list[str]]:
    """Yields the columns of a table, or the keys of each row of a file that can be read."""
    if columns := _columns(reader):
        yield list(columns)
        return
    for row in reader.rows(hashlib.blake2b()):
        try:
            value = read_row(row.content, None)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield list(value)


def _own_readers(source: DataSource, data_format: str) -> tuple[list[Reader], bool]:
    further = source.columns.values()
    if source.on_hub:
        return [hub_table(source)], False
    if data_format != "folder" and is_saved_dataset(path := Path(source.path).expanduser()):
        return [saved_table(path.resolve(), further)], False
    files, whole = data_files(source.path, data_format, source.columns)
    return [file_reader(file, whole) if whole else reader_of_rows(file, further) for file in files], whole


def _layouts(readers: Sequence[Reader], data_format: str) -> list[str | None]:
    """Returns the layout of each reader's rows: of the first row with known keys, or `data_format`.

    A reader without such a row has the only layout of the others, if there is one.
    """
    if data_format != "auto":
        return [data_format] * len(readers)
    found = [_first_layout(reader) for reader in readers]
    known = set(found) - {None}
    return [layout or (known.copy().pop() if len(known) == 1 else None) for layout in found]


def _columns(reader: Reader) -> dict[str, None]:
    """Returns the columns of a table, as they are read; none of a file whose rows have keys of their own."""
    if isinstance(reader, Renamed):
        return renamed(_columns(reader.reader), reader.names)
    return dict.fromkeys(reader.columns) if isinstance(reader, ArrowTable) else {}


def _first_layout(reader: Reader) -> str | None:
    if columns := _columns(reader):
        return layout_of(columns)
    for row in reader.rows(hashlib.blake2b()):
        try:
            layout = layout_of(read_row(row.content, None))
        except ValueError:
            continue
        if layout is not None:
            return layout
    return None


def _place(file: int, row: RawRow, layout: str | None, learned_answers: str, unread: Counter[str]) -> _Place | None:
    """Returns the place of a row's document; None if it is blank. Counts keys that are not read."""
    if row.problem is not None:
        raise ValueError(row.problem)
    value = read_row(row.content, layout)
    if value is None:
        return None
    if layout is None:
        raise ValueError(no_layout(value))
    record = record_of(value, layout, learned_answers)
    if record is None:
        return None
    if layout != "folder":
        unread.update(unread_keys(value, layout) | (further_keys(record["messages"]) if layout in CHATS else set()))
    answer_first = layout in CHATS and record["messages"][0]["role"] == "assistant"
    weighted = layout in CHATS and has_weights(record["messages"])
    return _Place(file, row.line, row.offset, row.size, answer_first, weighted)


def _documents(source: DataSource, readers: list[Reader], found: _Found, learned_answers: str) -> Documents:
    columns = np.asarray(found.places, np.int64).T
    # A file without a document has no say.
    layouts = sorted({str(found.layouts[i]) for i in set(columns[0].tolist())})
    texts, chats = set(layouts) - CHATS, set(layouts) & CHATS
    return Documents(
        format="mixed" if texts and chats else "chat" if chats else "folder" if texts == {"folder"} else "text",
        readers=tuple(readers),
        layouts=tuple(layout or "text" for layout in found.layouts),
        file=columns[0],
        line=columns[1],
        offset=columns[2],
        size=columns[3],
        fingerprint=found.fingerprint,
        begins_with_answer=columns[4].astype(bool),
        parts=(SourcePart(source.path, len(found.places), source.weight, found.problems.count, tuple(layouts), found.unread),),
        bad=found.problems.listed(len(found.places)),
        learned_answers=learned_answers,
        weighted=bool(columns[5].any()),
    )
