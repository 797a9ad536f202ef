"""Preference data on disk: JSON Lines, checked when they are opened and read by index."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.preferences.records import Judged, judged
from moe_jax.train.data.files import data_files
from moe_jax.train.data.problems import MAX_PROBLEMS
from moe_jax.train.data.records import decoded, parsed
from moe_jax.train.data.rows import mark_of

KINDS = {True: 'pairs ("chosen" and "rejected")', False: 'single answers ("completion" and "label")'}


@dataclass(frozen=True)
class Preferences:
    """A random-access source of `Judged` records.

    Attributes:
      files: the files, sorted; `file`, `line` (from 1), `offset` and `size` (bytes) say where each record lies.
      of_pairs: True if a record is a pair. False: it is a single answer.
      unpaired: the lines hold pairs, and each is two records of single answers.
      plain: as in `open_preferences`.
      fingerprint: a hash of the files' contents, in order.
    """

    files: tuple[Path, ...]
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
        try:
            with open(self.files[self.file[number]], "rb") as handle:
                handle.seek(self.offset[number])
                found = judged(parsed(decoded(handle.read(self.size[number]))), plain=self.plain)
        except ValueError as error:
            raise ValueError(f"{self.where(index)} is not as it was when it was opened: {error}") from error
        if not self.unpaired:
            return found
        answer: Any = found.answers[index % 2]
        return found._replace(answers=(answer,), desirable=index % 2 == 0)

    def where(self, index: int) -> str:
        """Returns the record's place for messages: file and line."""
        number = index // 2 if self.unpaired else index
        return f"{self.files[self.file[number]]}:{self.line[number]}"


def open_preferences(path: str | Path, *, of_pairs: bool = True, plain: bool = False) -> Preferences:
    """Opens and checks preference data: a .jsonl file, or a folder of some. `preferences.records` shows the layouts.

    Args:
      of_pairs: True for losses of pairs. False for KTO: each pair in the data becomes two single answers.
      plain: prompts and answers that are strings are texts to be continued. Otherwise they are messages of a user and of the
        assistant.

    Raises:
      FileNotFoundError: there is no such path, or no .jsonl file in it.
      ValueError: bad lines, listed by file and line; pairs beside single answers; single answers for a loss of pairs; or not
        one record.
    """
    files, _ = data_files(path, "chat")
    if others := [file.name for file in files if file.suffix != ".jsonl"]:
        raise ValueError(f"preference data are .jsonl files; {Path(path).expanduser()} has {', '.join(others[:MAX_PROBLEMS])}")
    digest = hashlib.blake2b(b"preferences", digest_size=16)
    places: list[tuple[int, int, int, int]] = []
    problems: list[str] = []
    found_pairs: bool | None = None
    for i, file in enumerate(files):
        digest.update(b"\0file\0")
        with open(file, "rb") as handle:
            offset = 0
            for line, content in enumerate(handle, start=1):
                digest.update(content)
                mark = mark_of(content) if line == 1 else 0
                if content[mark:].strip():
                    try:
                        is_pair = judged(parsed(decoded(content[mark:])), plain=plain).desirable is None
                        if found_pairs not in (None, is_pair):
                            raise ValueError(f"has {KINDS[is_pair]}, and lines before it have {KINDS[not is_pair]}")
                        found_pairs = is_pair
                        places.append((i, line, offset + mark, len(content) - mark))
                    except ValueError as error:
                        problems.append(f"{file}:{line}: {error}")
                offset += len(content)
    if problems:
        rest = len(problems) - MAX_PROBLEMS
        raise ValueError(
            "bad preference data: " + "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
        )
    if not places:
        raise ValueError(f"no line with preferences in {Path(path).expanduser().resolve()} ({len(files)} files)")
    if of_pairs and not found_pairs:
        raise ValueError(f"the loss needs {KINDS[True]}, and {files[0]} has {KINDS[False]}: take loss kto, or other data")
    file_numbers, lines, offsets, sizes = np.asarray(places, np.int64).T
    return Preferences(
        files=tuple(files),
        file=file_numbers,
        line=lines,
        offset=offsets,
        size=sizes,
        of_pairs=of_pairs,
        unpaired=bool(found_pairs) and not of_pairs,
        plain=plain,
        fingerprint=digest.hexdigest(),
    )
