"""Pieces and rows lose no label, and a stored position gives the batches that would have come."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.train import batches, open_documents
from moe_jax.train.data.packing import PADDING, pieces
from moe_jax.train.data.tokenization import Tokenized
from tests.helpers import tiny


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(2, 16), st.integers(0, 2**31))
def test_cutting_loses_no_label(length, seq_len, seed):
    rng = np.random.default_rng(seed)
    tokens, trained = rng.integers(0, 99, length).astype(np.int32), rng.random(length) < 0.5
    cut = pieces(Tokenized(tokens, trained, 7), seq_len)
    labels = np.concatenate([piece["labels"][piece["loss_mask"] == 1] for piece in cut] or [np.zeros(0, np.int32)])
    np.testing.assert_array_equal(labels, tokens[1:][trained[1:]])
    assert all(len(piece["tokens"]) <= seq_len and piece["loss_mask"].any() for piece in cut)


@pytest.mark.parametrize("weights", [(1, 0, 1), (0.5, 2, 1)])
def test_weights_stay_beside_their_tokens(weights, tmp_path):
    """Chats answer A and B, which are cut, and texts have C. The second half of the rows is another process's."""
    answers = [{"role": "assistant", "content": said * 9, "weight": of} for said, of in zip("AB", weights[:2], strict=True)]
    chats, texts = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, *answers]}))
    texts.write_text(json.dumps({"text": "C" * 9}))
    tokenizer = tiny.tokenizer()
    batch = next(batches(open_documents([chats, texts]), tokenizer, seq_len=24, batch_size=64, rows=range(32)))
    mask, labels = batch["loss_mask"][:32], batch["labels"][:32]
    for said, weight in zip("ABC", weights, strict=True):
        found = mask[labels == tokenizer(said)["input_ids"]]
        assert len(found) > 9 and (found == weight).all()
    assert (batch["loss_mask"][32:] == 0).all() and set(mask.ravel().tolist()) == {0, *weights}
    assert mask.dtype == (np.int32 if 0 in weights else np.float32)


@pytest.mark.parametrize("steps", [0, 1, 5, 23])
def test_a_restored_position_continues_the_batches(steps, tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    first, second = (batches(documents, tiny.tokenizer(), seq_len=24, batch_size=2, seed=5) for _ in range(2))
    for _ in range(steps):
        next(first)
    second.set_state(first.get_state())
    for _ in range(12):
        expected, actual = next(first), next(second)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name])


def equal(actual, expected, rows=slice(None)) -> bool:
    return all((actual[name][rows] == expected[name][rows]).all() for name in PADDING)


def test_processes_read_the_rows_of_one_batch(tmp_path):
    """64 rows are two streams. The merged positions of two processes restore all of them."""
    documents = open_documents(tiny.write_texts(tmp_path))

    def stream(rows=None):
        return batches(documents, tiny.tokenizer(), seq_len=24, batch_size=64, seed=5, rows=rows)

    parts = range(16), range(16, 40), range(40, 64)
    whole, processes = stream(), [stream(rows) for rows in parts]

    def follow(steps):
        for _ in range(steps):
            expected, actual = next(whole), [next(process) for process in processes]
            assert all(equal(batch, expected, list(rows)) for batch, rows in zip(actual, parts, strict=True))
            assert equal(actual[1], expected)
            # The first and the last process have one of the two streams.
            assert all((actual[0][name][32:] == padding).all() for name, padding in PADDING.items())
            assert all((actual[2][name][:32] == padding).all() for name, padding in PADDING.items())

    follow(3)
    position = processes[0].get_state() | processes[2].get_state()
    assert position == whole.get_state() == processes[1].get_state()
    whole, processes = stream(), [stream(rows) for rows in parts]
    for process in (whole, *processes):
        process.set_state(position)
    follow(2)


def test_a_position_of_other_streams_is_refused(tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    one, two = (batches(documents, tiny.tokenizer(), seq_len=24, batch_size=size) for size in (32, 64))
    with pytest.raises(ValueError, match="belongs to other streams: it has no stream of number 1. .* use the batch_size that"):
        two.set_state(one.get_state())


def test_streams_share_out_each_epoch(tmp_path):
    """Eight documents of a row each, so that 64 rows, of two streams, are eight epochs."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text("x" * 15)
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    batch = next(batches(open_documents(tmp_path), tokenizer, seq_len=16, batch_size=64))
    assert (np.bincount(batch["document"][:, 0]) == 8).all()
    assert not np.array_equal(batch["document"][:32], batch["document"][32:])


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
