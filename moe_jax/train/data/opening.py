"""Opens data sets: reads all rows of their sources once, and checks each of them."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.train.data import layouts
from moe_jax.train.data.chat import has_weights
from moe_jax.train.data.documents import Documents, SourcePart, joined
from moe_jax.train.data.hub import Streamed, hub_rows, hub_table, is_saved_dataset, local_table
from moe_jax.train.data.readers import ArrowTable, Reader, file_reader
from moe_jax.train.data.sources import DataSource, data_files, row_files, sources
from moe_jax.train.data.turns import EMPTY_THINKING, further_keys


def open_documents(
    data: str | Path | Sequence[str | Path],
    data_format: str = "auto",
    *,
    learned_answers: str = "all",
    empty_thinking: str = "learn",
    skip_bad: bool = False,
) -> Documents:
    """Opens and validates a data set, given as one or several sources.

    For a stream (`owner/name,stream=true`), only the first rows are checked now, and later ones when read.

    Args:
      data: a source, or several of them. A source is a file of rows (.jsonl, .ndjson, .json, .csv, .tsv, .parquet), or a folder
        of such files. Or a folder of UTF-8 text files, where each file is a document. Or the id of a data set of the hub.
        Options follow after commas (`DataSource`): `chats.jsonl,weight=0.7`, `owner/name,split=train,take=1000`. Folders are
        searched recursively through links; hidden files are left out. A byte order mark at a file's beginning is dropped.
      data_format: "folder", or a layout of rows ("chat", "text", "sharegpt", "alpaca", "pairs", "continuation"), or "auto".
        With "auto" a file's first row that has known keys decides. Files that the format leaves out are logged by name.
      learned_answers: "all", or "last": only the last turn of each conversation is learned.
      empty_thinking: "learn", or "mask": the empty think block that a template writes into an answer without reasoning is not
        learned.
      skip_bad: leave bad rows or files out, and count them, instead of raising.

    Raises:
      FileNotFoundError: there is no such path or data set, or no file in it.
      ImportError: Parquet or a data set of the hub, and `datasets` is not installed.
      ValueError: bad rows or files, listed by file and line; no document with text; or a dangling link. Also data that is
        compressed, a pipe or a device. With "auto", a folder that mixes files of rows with others.
    """
    if learned_answers not in layouts.LEARNED_ANSWERS:
        raise ValueError(f"learned_answers must be one of {', '.join(layouts.LEARNED_ANSWERS)}; got {learned_answers!r}")
    if empty_thinking not in EMPTY_THINKING:
        raise ValueError(f"empty_thinking must be one of {', '.join(EMPTY_THINKING)}; got {empty_thinking!r}")
    found = sources(data)
    opened = [_opened(source, source.format or data_format, learned_answers, skip_bad) for source in found]
    if empty_thinking == "mask":
        opened = [replace(each, empty_thinking="mask", fingerprint=f"{each.fingerprint} mask") for each in opened]
    if found[0].stream:
        rows, weighted = hub_rows(found[0]), opened[0].layouts[0] in layouts.CHATS
        return Streamed(**{**vars(opened[0]), "weighted": weighted}, first=opened[0], rows=rows)
    if len(opened) == 1:
        return opened[0]
    digest = hashlib.blake2b(b"several", digest_size=16)
    for source, documents in zip(found, opened, strict=True):
        digest.update(f"\0{documents.fingerprint} {source.weight}".encode())
    return joined(opened, digest.hexdigest())


def _opened(source: DataSource, data_format: str, learned_answers: str, skip_bad: bool) -> Documents:
    readers, whole = _readers(source, data_format)
    found = _layouts(readers, "folder" if whole else data_format, source.columns)
    # Stored runs have the fingerprint of a single format.
    kinds = found[0] if len(set(found)) == 1 else ",".join(map(str, found))
    kinds = str(kinds) + (" last" if learned_answers == "last" else "") + (" stream" if source.stream else "")
    digest, problems, unread = hashlib.blake2b(kinds.encode(), digest_size=16), Problems(), Counter[str]()

    def facts_of(file: int, content: bytes) -> tuple[bool, bool] | None:
        """Returns (begins with an answer, has weights other than 0 and 1) for a document."""
        return _facts(content, found[file], source.columns, learned_answers, unread)

    names = json.dumps(dict(source.columns), sort_keys=True).encode() if source.columns else b""
    places = read_all(readers, digest, problems, facts_of, names)
    for reader, layout in zip(readers, found, strict=True):
        if layout in layouts.LAYOUTS:
            unread.update(layouts.unread_keys(_columns(reader, source.columns), layout))
    listed = problems.listed(len(places))
    if listed and not (skip_bad and places):
        how_to_skip = "; --skip-bad-documents leaves them out, and counts them" if places else ""
        what = f"bad training data ({kinds}): " if any(found) else "bad training data: "
        raise ValueError(f"{what}{listed}{how_to_skip}")
    if not places:
        raise ValueError(f"no document with any text in {source.path} ({len(readers)} files)")
    file, line, offset, size, begins_with_answer, weighted = np.asarray(places, np.int64).T
    # Files without documents are ignored.
    held = sorted({str(found[i]) for i in set(file.tolist())})
    texts, chats = set(held) - layouts.CHATS, set(held) & layouts.CHATS
    part = SourcePart(source.path, len(places), source.weight, problems.count, tuple(held), tuple(sorted(unread)))
    return Documents(
        *(tuple(readers), file, line, offset, size, digest.hexdigest()),
        format="mixed" if texts and chats else "chat" if chats else "folder" if texts == {"folder"} else "text",
        layouts=tuple(layout or "text" for layout in found),
        columns=(source.columns,) * len(readers),
        begins_with_answer=begins_with_answer.astype(bool),
        parts=(part,),
        bad=listed,
        learned_answers=learned_answers,
        weighted=bool(weighted.any()),
    )


def indexed_rows(
    path: str | Path,
    further: Collection[str] | None,
    facts_of: Callable[[int, bytes], tuple[()] | None],
    *,
    digest_of: str,
    what: str,
    row: str,
) -> tuple[tuple[Reader, ...], np.ndarray, np.ndarray, np.ndarray, np.ndarray, str]:
    """Reads all rows of files once; returns the fields of an `IndexedRows`.

    Args:
      further: columns of Parquet files to read in addition, None for all.
      facts_of: as in `read_all`.
      digest_of: the text that the fingerprint begins with.
      what, row: the names of all rows and of one row, for errors.

    Raises:
      ValueError: bad rows, listed by file and line; or no row at all.
    """
    readers, digest, problems = row_readers(path, further), hashlib.blake2b(digest_of.encode(), digest_size=16), Problems()
    places = read_all(readers, digest, problems, facts_of)
    if problems.count:
        raise ValueError(f"bad {what}: {problems.listed(len(places))}")
    if not places:
        raise ValueError(f"no row with {row} in {Path(path).expanduser().resolve()} ({len(readers)} files)")
    file, line, offset, size = np.asarray(places, np.int64).T
    return tuple(readers), file, line, offset, size, digest.hexdigest()


def read_all(
    readers: Sequence[Reader],
    digest: "hashlib.blake2b",
    problems: "Problems",
    facts_of: Callable[[int, bytes], tuple[bool, ...] | None],
    names: bytes = b"",
) -> list[tuple[int, ...]]:
    """Reads all rows once; returns (file, line, offset, size, *facts) of each nonblank row.

    Args:
      digest: updated with all inputs that the rows depend on, and with `names` for each reader.
      problems: collects the rows that cannot be read.
      facts_of: called with the number of the reader and a row's content; returns None for a blank row. A ValueError counts as a
        problem.
    """
    found = []
    for i, reader in enumerate(readers):
        digest.update(b"\0file\0" + names)
        for row in reader.rows(digest):
            try:
                if row.problem is not None:
                    raise ValueError(row.problem)
                facts = facts_of(i, row.content)
            except ValueError as error:
                problems.add(str(error), reader.place(row.line))
            else:
                found += [] if facts is None else [(i, row.line, row.offset, row.size, *facts)]
    return found


def row_readers(path: str | Path, further: Collection[str] | None) -> list[Reader]:
    """Opens a file of rows, a folder of such files, or a folder that `save_to_disk` of the library `datasets` wrote.

    Args:
      further: additional columns of tables to read; None: all.

    Raises:
      FileNotFoundError, ImportError, ValueError: as `open_documents`.
    """
    folder = Path(path).expanduser()
    if is_saved_dataset(folder):
        return [local_table(folder.resolve(), further)]
    return [reader_of_rows(file, further) for file in row_files(folder)]


def reader_of_rows(file: Path, further: Collection[str] | None) -> Reader:
    """Opens a file of rows with the reader for its extension."""
    return local_table(file, further) if file.suffix.lower() == ".parquet" else file_reader(file, whole=False)


def _readers(source: DataSource, data_format: str) -> tuple[list[Reader], bool]:
    """Returns the readers of a source, and True if each file is a document as a whole; checks the names of its columns."""
    further, path = source.columns.values(), Path(source.path).expanduser()
    readers: list[Reader]
    if source.on_hub:
        readers, whole = [hub_table(source)], False
    elif data_format != "folder" and is_saved_dataset(path):
        readers, whole = [local_table(path.resolve(), further)], False
    else:
        files, whole = data_files(source.path, data_format, source.columns)
        readers = [file_reader(file, whole) if whole else reader_of_rows(file, further) for file in files]
    if source.columns and whole:
        raise ValueError(f"{source.path} holds texts, and {', '.join(source.columns)} name columns of rows; leave them out")
    if source.columns:
        try:
            layouts.check_columns(
                source.columns, (row for reader in readers for row in _values(reader) if isinstance(row, dict))
            )
        except ValueError as error:
            raise ValueError(f"{source.path}: {error}") from error
    return readers, whole


def _values(reader: Reader, columns: Mapping[str, str] = layouts.NO_COLUMNS) -> Iterator[Any]:
    """Yields one row with all columns of a table, or each readable row of a file."""
    if isinstance(reader, ArrowTable):
        yield _columns(reader, columns)
        return
    for row in reader.rows(hashlib.blake2b()):
        with contextlib.suppress(ValueError):
            yield layouts.read_row(row.content, None, columns)


def _layouts(readers: Sequence[Reader], data_format: str, columns: Mapping[str, str]) -> list[str | None]:
    """Returns the layout of each reader's rows: the first row's with known keys, or `data_format`.

    A reader without such a row gets the other readers' layout, if they share one.
    """
    if data_format != "auto":
        return [data_format] * len(readers)
    found = [next(filter(None, map(layouts.layout_of, _values(reader, columns))), None) for reader in readers]
    known = set(found) - {None}
    return [layout or (known.copy().pop() if len(known) == 1 else None) for layout in found]


def _columns(reader: Reader, columns: Mapping[str, str]) -> dict[str, None]:
    """Returns the columns of a table in reading order; none for a file whose rows have their own keys."""
    return layouts.renamed(dict.fromkeys(reader.columns), columns) if isinstance(reader, ArrowTable) else {}


def _facts(
    content: bytes, layout: str | None, columns: Mapping[str, str], learned_answers: str, unread: Counter[str]
) -> tuple[bool, bool] | None:
    """Returns the facts of a row's document; None if it is blank. Counts unused keys."""
    value = layouts.read_row(content, layout, columns)
    if value is None:
        return None
    if layout is None:
        raise ValueError(layouts.no_layout(value))
    record = layouts.record_of(value, layout, learned_answers)
    if record is None:
        return None
    messages = record["messages"] if layout in layouts.CHATS else []
    if layout != "folder":
        unread.update(layouts.unread_keys(value, layout) | further_keys(messages))
    return bool(messages) and messages[0]["role"] == "assistant", has_weights(messages)


MAX_PROBLEMS = 10
"""A message lists this many problems, and counts the rest."""


class Problems:
    """Collects errors in rows: counts them, and keeps the first location of each distinct one."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[str, str] = {}
        self._times: Counter[str] = Counter()

    def add(self, problem: str, place: str) -> None:
        """Records an error message and the row's location."""
        self.count += 1
        self._first.setdefault(problem, place)
        self._times[problem] += 1

    def listed(self, num_good: int) -> str:
        """Returns the distinct errors as one text, each after its first location and with its count."""
        clauses = []
        for problem, place in self._first.items():
            times = self._times[problem]
            same = f"the same in all {times}" if times == self.count + num_good else f"the same in {times - 1} more"
            clauses.append(f"{place}: {problem}" + (f" ({same})" if times > 1 else ""))
        rest = len(clauses) - MAX_PROBLEMS
        return "; ".join(clauses[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
