"""Training documents read by index: texts and conversations in files, folders and data sets of the hub.

All rows are read once when they are opened. This finds bad rows before training starts, indexes the documents by position, and
computes a fingerprint that a resumed run compares. Afterwards only one document of a file is in memory at a time.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.train.data.layouts import CHATS, read_record
from moe_jax.train.data.readers import Reader

BAD = "\0bad"
"""Key of a record that is skipped or refused, with the reason ("" for a blank row). Only streams have such records."""


class SourcePart(NamedTuple):
    """Facts about one source of a data set, whose documents have consecutive indices.

    Attributes:
      name: the source's path or id.
      documents: how many there are.
      weight: the source's weight; None without.
      bad: number of skipped rows.
      layouts: the layouts of its rows, sorted; "folder" for text files.
      unread: unused keys of its rows, sorted, and "messages.KEY" for keys that only a chat template may read.
    """

    name: str
    documents: int
    weight: float | None
    bad: int
    layouts: tuple[str, ...]
    unread: tuple[str, ...]


@dataclass(frozen=True)
class IndexedRows:
    """Random access to rows of files and tables, located by file, offset and size.

    Attributes:
      readers: files and tables; `file`, `line` (from 1), `offset` and `size` (bytes) locate each row.
      fingerprint: a hash of all contents, in order.
    """

    readers: tuple[Reader, ...]
    file: np.ndarray
    line: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.file)

    def content(self, index: int) -> bytes | None:
        """Returns a row's bytes; None if its file has changed since it was opened."""
        return self.readers[self.file[index]].content(int(self.offset[index]), int(self.size[index]))


@dataclass(frozen=True)
class Documents(IndexedRows):
    """A random-access source: `documents[i]` is {"document": i} and "text", "messages", or "prompt" and "completion".

    Reading raises a ValueError that names the file if it has changed since it was opened.

    Attributes:
      format: "folder", "text" or "chat"; "mixed" for texts and chats together.
      layouts: the layout of each reader's rows; "folder" for a text file.
      columns: {key of a layout: column} of each reader's rows, as in `DataSource`.
      begins_with_answer: bool [documents], true for conversations whose first message is the assistant's.
      parts: the sources.
      bad: a message about skipped rows; "" if there are none.
      learned_answers: "all", or "last": only the last turn of each conversation is learned.
      empty_thinking: "learn", or "mask": empty think blocks that answers begin with are not learned.
      weighted: True if an answer has a weight other than 0 and 1.
    """

    format: str
    layouts: tuple[str, ...]
    columns: tuple[Mapping[str, str], ...]
    begins_with_answer: np.ndarray
    parts: tuple[SourcePart, ...]
    bad: str = ""
    learned_answers: str = "all"
    empty_thinking: str = "learn"
    weighted: bool = False
    is_stream = False
    """True for documents that are read in order (`hub.Streamed`)."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.file[index]
        with contextlib.suppress(ValueError):
            content, named = self.content(index), (self.layouts[number], self.learned_answers, self.columns[number])
            if content is not None and (record := read_record(content, *named)) is not None:
                return {**record, "document": int(index)}
        raise ValueError(
            f"the training data changed while it was in use: {self.readers[number].name} is not as it was when "
            f"it was opened (document {self.where(index)}); put the old file back, or begin a new run with the new one"
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the files, sorted within each source."""
        return tuple(reader.path for reader in self.readers if reader.path is not None)

    @property
    def is_chat(self) -> np.ndarray:
        """Bool [documents], true for conversations."""
        return np.asarray([layout in CHATS for layout in self.layouts])[self.file]

    @property
    def surveyed(self) -> "Documents":
        """The documents measured by `survey`: all, or a stream's first rows."""
        return self

    @property
    def num_bad(self) -> int:
        """The number of skipped rows."""
        return sum(part.bad for part in self.parts)

    def where(self, index: int) -> str:
        """Returns the document's location for error messages: file, line and byte offset, or a row's number."""
        return self.readers[self.file[index]].where(int(self.line[index]), int(self.offset[index]))


def joined(parts: Sequence[Documents], fingerprint: str) -> Documents:
    """Concatenates the documents of several sources into one data set."""
    firsts = np.cumsum([0, *(len(part.readers) for part in parts)])
    formats = {part.format for part in parts}
    joint: dict[str, Any] = {
        name: tuple(each for part in parts for each in getattr(part, name))
        for name in ("readers", "layouts", "columns", "parts")
    }
    for name in ("line", "offset", "size", "begins_with_answer"):
        joint[name] = np.concatenate([getattr(part, name) for part in parts])
    return replace(
        parts[0],
        format=formats.pop() if len(formats) == 1 else "mixed" if formats & {"chat", "mixed"} else "text",
        file=np.concatenate([part.file + first for part, first in zip(parts, firsts, strict=False)]),
        fingerprint=fingerprint,
        bad="; ".join(part.bad for part in parts if part.bad),
        weighted=any(part.weighted for part in parts),
        **joint,
    )
