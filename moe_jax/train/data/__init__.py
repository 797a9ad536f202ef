"""Endless, shuffled, resumable batches of packed rows, made from documents on disk.

The shuffled documents of all epochs are assigned to streams in turn. Each stream packs 32 or more rows of a batch by itself.
The number of streams depends only on the batch size.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_jax.train.data.documents import Documents
from moe_jax.train.data.hub import Mark, RowStream, Streamed
from moe_jax.train.data.mixing import endless
from moe_jax.train.data.opening import open_documents
from moe_jax.train.data.packing import PACKING_ROWS, PADDING, packed, pieces
from moe_jax.train.data.tokenization import Tokenized, tokenization, tokenizer_fingerprint

if TYPE_CHECKING:
    import grain

__all__ = ["Batches", "Documents", "batches", "open_documents", "tokenizer_fingerprint"]

MARK = "mark"
"""Key of a position for its mark in the rows of a hub's stream."""
Rows = dict[str, np.ndarray]
"""Arrays [rows, seq_len], by the names of `packing`."""


def batches(
    documents: Documents,
    tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    rows: Iterable[int] | None = None,
    begin_texts: bool = True,
    skip_bad: bool = False,
) -> "Batches":
    """Returns an endless iterator of batches: dicts of int32 [batch_size, seq_len] (`packing`). Each epoch has its own order.

    If answers have weights other than 0 and 1, "loss_mask" holds the labels' weights, f32.

    `get_state()` returns the position, a tree of JSON values. `set_state` returns to it exactly, given the same arguments. Text
    documents begin with the tokenizer's BOS token, if it adds one, and end with its eos token. The chat template renders chats.
    Threads prepare the next batch while a step computes.

    Args:
      rows: the rows that this process needs (`Parallelism.own_rows`). Other rows may hold padding. Default: all rows.
      begin_texts: False leaves out the tokenizer's BOS token, as runs begun before version 0.2 did.
      skip_bad: leave out conversations that the template cannot render, instead of raising. Positions are compatible either
        way.

    Raises:
      ValueError: the tokenizer has no eos token for text, no template for chat, or returns no character offsets. Also if
        conversations begin with an answer, and the template does not mark answers. While iterating: a conversation that the
        template cannot render, by file and line, or a file that changed since it was opened. The position is then the one
        before the batch.
    """
    # The import takes half a second. Commands that read no data should not pay for it.
    import grain

    skipped: dict[int, str] = {}
    tokenized = tokenization(documents, tokenizer, begin_texts=begin_texts, skipped=skipped if skip_bad else None)
    order = endless(documents, seed)
    # Rows of a hub's stream are read once and in order, so by one stream.
    rows_of_stream = batch_size if documents.is_stream else _rows_of_stream(batch_size)
    num_streams = batch_size // rows_of_stream
    streams = {}
    for i in sorted({row // rows_of_stream for row in (range(batch_size) if rows is None else rows)}):
        stream = order[i::num_streams].map(tokenized)
        stream = stream.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
        stream = grain.experimental.FlatMapIterDataset(stream, _cut(seq_len))
        stream = packed(stream, seq_len=seq_len, seed=seed).batch(rows_of_stream, drop_remainder=True)
        streams[i] = iter(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=1))
    padding = {name: np.full((rows_of_stream, seq_len), value, np.int32) for name, value in PADDING.items()}
    if documents.weighted:
        padding["loss_mask"] = padding["loss_mask"].astype(np.float32)
    return Batches(streams, num_streams, padding, skipped, documents.rows if isinstance(documents, Streamed) else None)


class Batches(Iterator[Rows]):
    """An iterator over batches whose rows come from `num_streams` independent streams; other processes' rows are padding.

    A packed row depends on all earlier documents of its own stream, and on no other stream. So batches are the same
    for any number of processes. Each process reads the streams whose rows it needs.

    Attributes:
      skipped: {document index: reason} of all documents left out so far.
    """

    def __init__(
        self,
        streams: "dict[int, grain.DatasetIterator[Rows]]",
        num_streams: int,
        padding: Rows,
        skipped: dict[int, str],
        of_hub: RowStream | None = None,
    ):
        self._streams, self._num_streams, self._padding, self.skipped = streams, num_streams, padding, skipped
        self._of_hub = of_hub
        # Grain's iterators end their threads when deleted. At interpreter exit that would be too late.
        weakref.finalize(self, streams.clear)

    def __next__(self) -> Rows:
        before = self.get_state()
        try:
            parts = [next(self._streams[i]) if i in self._streams else self._padding for i in range(self._num_streams)]
        except Exception:
            # Some streams have already advanced, and the failed stream is past the bad document.
            self.set_state(before)
            raise
        return {name: np.concatenate([part[name] for part in parts]) for name in PADDING}

    def get_state(self) -> dict[str, Any]:
        """Returns this process's position as {stream number: position}, and the position in a hub stream."""
        positions = {str(i): stream.get_state() for i, stream in self._streams.items()}
        if self._of_hub is None:
            return positions
        first = min(map(_next_document, positions.values()), default=0)
        return positions | {MARK: self._of_hub.mark_before(first)._asdict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that includes all streams of this process.

        Raises:
          ValueError: the position lacks a stream.
        """
        if missing := [i for i in self._streams if str(i) not in state]:
            raise ValueError(
                f"the position belongs to other streams: it has no stream of number {', '.join(map(str, missing))}. "
                "Documents are dealt out by batch_size; use the batch_size that the position was saved with"
            )
        if self._of_hub is not None and MARK in state:
            self._of_hub.add_mark(Mark(**state[MARK]))
        for i, stream in self._streams.items():
            stream.set_state(state[str(i)])

    def close(self) -> None:
        """Stops the prefetching threads."""
        for stream in self._streams.values():
            stream.close()


def _next_document(position: dict[str, Any]) -> int:
    """Returns a lower bound on the documents that a stream reads from this position: the innermost of Grain's positions."""
    while "parent" in position:
        position = position["parent"]
    return max(0, position.get("next_index", 0) - 1)


def _rows_of_stream(batch_size: int) -> int:
    """Returns the smallest divisor of `batch_size` that is at least PACKING_ROWS; `batch_size` if it is smaller.

    A stream of fewer rows would tokenize documents of later batches before it yields its first row.
    """
    return next(rows for rows in range(min(PACKING_ROWS, batch_size), batch_size + 1) if batch_size % rows == 0)


def _cut(seq_len: int) -> "grain.experimental.FlatMapTransform":
    """Returns the transform from a tokenized document to its pieces."""
    import grain

    class Cut(grain.experimental.FlatMapTransform):
        def flat_map(self, element: Tokenized) -> list[dict[str, np.ndarray]]:
            return pieces(element, seq_len)

    return Cut()
