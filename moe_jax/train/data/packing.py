"""Documents packed into rows of one length: pieces side by side, told apart by segment ids.

    tokens        a b c d | x y z | 0      segment_ids  1 1 1 1 2 2 2 0
    labels        b c d _ | y z _ | _      positions    0 1 2 3 0 1 2 0
    loss_mask     1 1 1 0 | 1 1 0 | 0      document     7 7 7 7 3 3 3 -1

The last token of a document has no label. A document longer than a row is cut into pieces, each a segment of its own; the
label of a piece's last token is the next piece's first, so cutting loses no label.
"""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

if TYPE_CHECKING:
    import grain

PACKING_ROWS = 32
"""Rows that are filled at once: a piece goes into the first that has room. More rows leave less padding, make a resume read
more documents again, and a batch be dealt out to fewer streams."""

PADDING = {"tokens": 0, "labels": 0, "loss_mask": 0, "document": -1, "segment_ids": 0, "positions": 0}
"""What stands where no document does."""

FEATURES = ("tokens", "labels", "loss_mask", "document")


def pieces(
    tokens: Int[np.ndarray, "length"], trained: Bool[np.ndarray, "length"], document: int, seq_len: int
) -> list[dict[str, np.ndarray]]:
    """The document cut to pieces of at most seq_len tokens, without those in which nothing is to be predicted.

    Args:
      trained: which tokens the model learns to predict; the first never can be.
    """
    whole = {
        "tokens": tokens,
        "labels": np.append(tokens[1:], 0),
        "loss_mask": np.append(trained[1:], False),
        "document": np.full(len(tokens), document),
    }
    cuts = [slice(start, start + seq_len) for start in range(0, len(tokens), seq_len)]
    return [
        {name: array[cut].astype(np.int32) for name, array in whole.items()} for cut in cuts if whole["loss_mask"][cut].any()
    ]


def packed(dataset: "grain.IterDataset", *, seq_len: int, seed: int) -> "grain.IterDataset":
    """Rows of exactly seq_len from a dataset of pieces, as the picture above."""
    import grain

    rows = grain.experimental.FirstFitPackIterDataset(
        dataset,
        length_struct=dict.fromkeys(FEATURES, seq_len),
        num_packing_bins=PACKING_ROWS,
        seed=seed,
        meta_features=[name for name in FEATURES if name != "tokens"],
        padding_struct={name: PADDING[name] for name in FEATURES},
    )
    return rows.map(_renamed)


def _renamed(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    row = dict(row)
    row["segment_ids"] = row.pop("tokens_segment_ids")
    row["positions"] = row.pop("tokens_positions")
    return row
