"""Examples side by side in the rows of a batch, as `preferences.answers` draws them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from moe_jax.preferences.answers import KL
from moe_jax.preferences.tokens import Example, Text
from moe_jax.train.batch import BATCH_ARRAYS


class OpenRows:
    """Rows of a batch that are being filled. All texts of an example lie in one row.

    Attributes:
      examples: the examples of each row.
    """

    def __init__(self, rows: int, seq_len: int, max_examples: int):
        self.seq_len, self.max_examples = seq_len, max_examples
        self.examples: list[list[Example]] = [[] for _ in range(rows)]

    def add(self, example: Example) -> bool:
        """Puts an example into the first row that has room; returns False if none has."""
        for row in self.examples:
            if len(row) < self.max_examples and self._fits([*row, example]):
                row.append(example)
                return True
        return False

    def _fits(self, row: Sequence[Example]) -> bool:
        lengths = sum(len(text.tokens) for example in row for text in example.texts)
        mismatched = sum(len(example.mismatched.tokens) for example in row if example.mismatched)
        return max(lengths, mismatched) <= self.seq_len

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the batch: int32 [rows, seq_len], and [rows, max_examples] for "example" and "desirable"."""
        batch = self._of_texts("", lambda example: example.texts)
        shape = len(self.examples), self.max_examples
        batch["example"] = np.full(shape, -1, np.int32)
        single = any(example.desirable is not None for row in self.examples for example in row)
        if single:
            batch |= self._of_texts(KL, lambda example: (example.mismatched,))
            batch["desirable"] = np.zeros(shape, np.int32)
        for i, row in enumerate(self.examples):
            batch["example"][i, : len(row)] = [example.number for example in row]
            if single:
                batch["desirable"][i, : len(row)] = [example.desirable for example in row]
        return batch

    def _of_texts(self, prefix: str, texts_of) -> dict[str, np.ndarray]:
        rows = [row_of_texts([text for example in row for text in texts_of(example)], self.seq_len) for row in self.examples]
        return {prefix + name: np.stack([row[name] for row in rows]) for name in BATCH_ARRAYS}


def row_of_texts(texts: Sequence[Text], seq_len: int) -> dict[str, Int[np.ndarray, " seq"]]:
    """Returns the arrays of a row, text i in segment i + 1."""
    row = {name: np.zeros(seq_len, np.int32) for name in BATCH_ARRAYS}
    start = 0
    for segment, (tokens, learned) in enumerate(texts, start=1):
        inside = slice(start, start + len(tokens))
        row["tokens"][inside] = tokens
        row["labels"][inside] = np.append(tokens[1:], 0)
        row["loss_mask"][inside] = np.append(learned[1:], False)
        row["positions"][inside] = np.arange(len(tokens))
        row["segment_ids"][inside] = segment
        start = inside.stop
    return row
