"""Documents that leave nothing to learn. Without any other, an iteration would look for one for ever."""

import logging
from collections.abc import Callable, Mapping

from moe_jax.train.data.documents import Documents
from moe_jax.train.data.streams import Streamed

MANY_ROWS = 10_000
"""Rows of a stream, left out one after the other, that give a warning: all rows of a stream may take days."""
_logger = logging.getLogger(__name__)


def watch(documents: Documents, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    """Returns told(index, learned), to be called with each document that was read, and True if it has a token to learn.

    Args:
      skipped: {document index: reason} of documents that are left out.

    Raises:
      ValueError: by `told`, if all documents, or all rows of a stream from its beginning to its end, leave nothing to learn.
    """
    return _watch_rows(documents, skipped) if isinstance(documents, Streamed) else _watch(documents, skipped)


def _watch(documents: Documents, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    unused: set[int] = set()

    def told(index: int, learned: bool) -> None:
        if not learned:
            unused.add(index)
            if len(unused) == len(documents):
                raise ValueError(_nothing(documents, len(unused), index, skipped))

    return told


def _watch_rows(documents: Streamed, skipped: Mapping[int, str]) -> Callable[[int, bool], None]:
    # Rows from `since` up to `coming` leave nothing to learn. Where a restored position goes elsewhere, they begin anew.
    since = coming = 0

    def told(row: int, learned: bool) -> None:
        nonlocal since, coming
        since, coming = since if row == coming else row, row + 1
        if learned:
            since = coming
        elif (whole := documents.rows.last_round) is not None and since <= whole.start and whole.stop <= coming:
            raise ValueError(_nothing(documents, len(whole), whole[-1], skipped))
        elif coming - since == MANY_ROWS:
            _logger.warning("the last %d rows were left out; the last: %s", MANY_ROWS, _why(documents, row, skipped))

    return told


def _nothing(documents: Documents, number: int, last: int, skipped: Mapping[int, str]) -> str:
    names = ", ".join(part.name for part in documents.parts)
    chats = documents.surveyed.is_chat.any()
    other = "a chat template that takes such conversations (--chat-template), or other data" if chats else "other data"
    return (
        f"nothing to learn: all {number:,} documents that were read of {names} are left out; the last: "
        f"{_why(documents, last, skipped)}; give {other}"
    )


def _why(documents: Documents, index: int, skipped: Mapping[int, str]) -> str:
    return skipped.get(index, f"{documents.where(index)}: it has no token to learn")
