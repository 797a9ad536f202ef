"""Pieces and rows lose no label, and a stored position gives the batches that would have come."""

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.train import batches, open_documents
from moe_jax.train.data.packing import pieces


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(2, 16), st.integers(0, 2**31))
def test_cutting_loses_no_label(length, seq_len, seed):
    rng = np.random.default_rng(seed)
    tokens, trained = rng.integers(0, 99, length).astype(np.int32), rng.random(length) < 0.5
    cut = pieces(tokens, trained, 7, seq_len)
    labels = np.concatenate([piece["labels"][piece["loss_mask"] == 1] for piece in cut] or [np.zeros(0, np.int32)])
    np.testing.assert_array_equal(labels, tokens[1:][trained[1:]])
    assert all(len(piece["tokens"]) <= seq_len and piece["loss_mask"].any() for piece in cut)


@pytest.mark.parametrize("steps", [0, 1, 5, 23])
def test_a_restored_position_gives_the_batches_that_would_have_come(steps, tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    first, second = (batches(documents, tiny.tokenizer(), seq_len=24, batch_size=2, seed=5) for _ in range(2))
    for _ in range(steps):
        next(first)
    second.set_state(first.get_state())
    for _ in range(12):
        expected, actual = next(first), next(second)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name])


def test_each_row_is_full_of_whole_segments(tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    stream = batches(documents, tiny.tokenizer(), seq_len=64, batch_size=4, seed=5)
    for _ in range(8):
        batch = next(stream)
        real = batch["segment_ids"] > 0
        assert real.mean() > 0.5
        assert (batch["loss_mask"][~real] == 0).all() and (batch["document"][~real] == -1).all()
        starts = np.diff(batch["segment_ids"], prepend=0, axis=1) != 0
        assert (batch["positions"][starts & real] == 0).all()
