"""Preference data on disk: rows of JSON, CSV or Parquet, checked when they are opened and read by index."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.preferences.records import Judged, judged
from moe_jax.train.data.opening import row_readers
from moe_jax.train.data.problems import Problems
from moe_jax.train.data.records import decoded, parsed
from moe_jax.train.data.rows import Reader

COLUMNS = "chosen", "rejected", "label"
"""Columns of tables that no layout of fine-tuning reads."""
KINDS = {True: 'pairs ("chosen" and "rejected")', False: 'single answers ("completion" and "label")'}


@dataclass(frozen=True)
class Preferences:
    """A random-access source of `Judged` records.

    Attributes:
      readers: the files, sorted; `file`, `line` (from 1), `offset` and `size` (bytes) say where each record lies.
      of_pairs: True if a record is a pair. False: it is a single answer.
      unpaired: the rows hold pairs, and each is two records of single answers.
      plain: as in `open_preferences`.
      fingerprint: a hash of the files' contents, in order.
    """

    readers: tuple[Reader, ...]
    file: np.ndarray
    line: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    of_pairs: bool
    unpaired: bool
    plain: bool
    fingerprint: str

    def __len__(self) -> int:
        return len(self.file) * (2 if self.unpaired else 1)

    def __getitem__(self, index: int) -> Judged:
        number = index // 2 if self.unpaired else index
        content = self.readers[self.file[number]].content(int(self.offset[number]), int(self.size[number]))
        if content is None:
            raise ValueError(f"{self.where(index)} is not as it was when it was opened: put the old file back")
        found = judged(parsed(decoded(content)), plain=self.plain)
        if not self.unpaired:
            return found
        answer: Any = found.answers[index % 2]
        return found._replace(answers=(answer,), desirable=index % 2 == 0)

    def where(self, index: int) -> str:
        """Returns the record's place for messages: file and line, or a row's number."""
        number = index // 2 if self.unpaired else index
        return self.readers[self.file[number]].place(int(self.line[number]))


def open_preferences(path: str | Path, *, of_pairs: bool = True, plain: bool = False) -> Preferences:
    """Opens and checks preference data: a file of rows, or a folder of some. `preferences.records` shows the layouts.

    Files are those that fine-tuning reads: .jsonl, .ndjson, .json, .csv, .tsv and .parquet, and folders of `save_to_disk`.

    Args:
      of_pairs: True for losses of pairs. False for KTO: each pair in the data becomes two single answers.
      plain: prompts and answers that are strings are texts to be continued. Otherwise they are messages of a user and of the
        assistant.

    Raises:
      FileNotFoundError: there is no such path, or no file of rows in it.
      ImportError: Parquet, and `datasets` is not installed.
      ValueError: bad rows, listed by file and line; pairs beside single answers; single answers for a loss of pairs; or not
        one record.
    """
    readers, digest, problems = row_readers(path, COLUMNS), hashlib.blake2b(b"preferences", digest_size=16), Problems()
    places: list[tuple[int, int, int, int]] = []
    found_pairs: bool | None = None
    for i, reader in enumerate(readers):
        digest.update(b"\0file\0")
        for row in reader.rows(digest):
            try:
                if row.problem is not None:
                    raise ValueError(row.problem)
                if not row.content.strip():
                    continue
                is_pair = judged(parsed(decoded(row.content)), plain=plain).desirable is None
                if found_pairs not in (None, is_pair):
                    raise ValueError(f"has {KINDS[is_pair]}, and rows before it have {KINDS[not is_pair]}")
                found_pairs = is_pair
                places.append((i, row.line, row.offset, row.size))
            except ValueError as error:
                problems.add(str(error), reader.place(row.line))
    if problems.count:
        raise ValueError(f"bad preference data: {problems.listed(len(places))}")
    if not places:
        raise ValueError(f"no row with preferences in {Path(path).expanduser().resolve()} ({len(readers)} files)")
    if of_pairs and not found_pairs:
        raise ValueError(
            f"the loss needs {KINDS[True]}, and {readers[0].name} has {KINDS[False]}: take loss kto, or other data"
        )
    file_numbers, lines, offsets, sizes = np.asarray(places, np.int64).T
    return Preferences(
        readers=tuple(readers),
        file=file_numbers,
        line=lines,
        offset=offsets,
        size=sizes,
        of_pairs=of_pairs,
        unpaired=bool(found_pairs) and not of_pairs,
        plain=plain,
        fingerprint=digest.hexdigest(),
    )
