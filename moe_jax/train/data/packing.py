"""Documents packed into rows of one length: adjacent pieces, distinguished by segment ids.

    tokens        a b c d | x y z | 0      segment_ids  1 1 1 1 2 2 2 0
    labels        b c d _ | y z _ | _      positions    0 1 2 3 0 1 2 0
    loss_mask     1 1 1 0 | 1 1 0 | 0      document     7 7 7 7 3 3 3 -1

The last token of a document has no label. A document longer than a row is cut into pieces, and each piece is a segment.
The label of a piece's last token is the next piece's first token, so cutting loses no label.
Arrays are int32. If the data has weights, `loss_mask` holds the weight of each label, f32.
"""

from typing import TYPE_CHECKING

import numpy as np

from moe_jax.train.data.tokenization import Tokenized

if TYPE_CHECKING:
    import grain

PACKING_ROWS = 32
"""Rows that are filled at once: a piece goes into the first row that has room. More rows leave less padding.
But a resumed run then re-reads more documents, and a batch has fewer streams."""

PADDING = {"tokens": 0, "labels": 0, "loss_mask": 0, "document": -1, "segment_ids": 0, "positions": 0}
"""The values of positions without a document."""

FEATURES = ("tokens", "labels", "loss_mask", "document")


def pieces(document: Tokenized, seq_len: int) -> list[dict[str, np.ndarray]]:
    """Cuts a document into pieces of at most seq_len tokens; drops pieces without a label."""
    tokens, learned, index = document
    whole = {
        "tokens": tokens,
        "labels": np.append(tokens[1:], 0),
        "loss_mask": np.append(learned[1:], learned.dtype.type(0)),
        "document": np.full(len(tokens), index),
    }
    cuts = [slice(start, start + seq_len) for start in range(0, len(tokens), seq_len)]
    arrays = {name: array.astype(np.int32) if array.dtype != np.float32 else array for name, array in whole.items()}
    return [{name: array[cut] for name, array in arrays.items()} for cut in cuts if whole["loss_mask"][cut].any()]


def packed(dataset: "grain.IterDataset", *, seq_len: int, seed: int) -> "grain.IterDataset":
    """Packs pieces of documents into rows of exactly seq_len tokens, as drawn in the module's docstring."""
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
