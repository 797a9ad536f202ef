"""Documents of a data set of the hub that come as a stream: rows are read in their order, and nothing is downloaded before.

The first rows are looked at when the stream is opened. They decide the layout, and are measured before a run.
"""

import copy
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_jax.train.data.documents import BAD, Documents
from moe_jax.train.data.layouts import CHATS, read_record

KEPT_ROWS = 4096
"""Rows that stay in memory, so that the first batch can be made twice without reading them twice."""
MARKED_ROWS = 256
"""A mark is made after this many rows: a run that continues passes over fewer rows than these."""
KEPT_MARKS = 1024
"""Marks that stay in memory. Rows that were read ahead and not learned must not push out those that a checkpoint needs."""
_logger = logging.getLogger(__name__)


def streamed(first: Documents, rows: "RowStream") -> "Streamed":
    """Returns the endless documents of a stream, given those of its first rows."""
    return Streamed(**{**vars(first), "weighted": first.layouts[0] in CHATS}, first=first, rows=rows)


@dataclass(frozen=True)
class Streamed(Documents):
    """Documents by the number of their row, from 0; a stream that ends begins again. Other fields are of the first rows.

    A chat counts as weighted, because a later row may have weights.

    Attributes:
      first: the documents of the first rows.
      rows: all rows.
    """

    first: Documents = field(kw_only=True)
    rows: "RowStream" = field(kw_only=True)

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
        """The documents of the first rows."""
        return self.first

    @property
    def is_stream(self) -> bool:
        """True."""
        return True

    def where(self, index: int) -> str:
        """Returns the number of the row, from 1, which counts on where the stream begins again."""
        return self.readers[0].place(int(index) + 1)


class Mark(NamedTuple):
    """A place in a stream: the number of a row, and the state of the data set before it, in values of JSON."""

    row: int
    state: dict[str, Any]


class RowStream:
    """The rows of a stream by their number, read forward. The newest KEPT_ROWS stay; a row before them is read again.

    Args:
      data: a `datasets.IterableDataset`.
      content: gives a row's content.

    Attributes:
      last_round: the numbers of the rows from the stream's beginning to its end, when they were read last; None before.
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
                except Exception as error:  # of many kinds, for a network or a file that fails
                    self._coming = None
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    raise ValueError(f"{self._name}: row {self._next + 1} cannot be read: {reason}") from error
                self._next += 1
            return self._kept[number - self._next]

    def mark_before(self, number: int) -> Mark:
        """Returns the last mark at or before a row, from which the row is reached soon; the beginning without one."""
        before = [mark for mark in list(self._marks) if mark.row <= number]
        return max(before, default=self._beginning, key=lambda mark: mark.row)

    def add_mark(self, mark: Mark) -> None:
        """Adds a mark of another reader of the same stream."""
        self._marks.append(mark)

    def _from(self, start: int) -> Iterator[bytes]:
        """Yields the contents from a number on, round after round. Rows between the last mark and `start` are passed over."""
        number, state = self.mark_before(start)
        while True:
            # An iteration writes into the state that it began with. Copies of a data set share it.
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
