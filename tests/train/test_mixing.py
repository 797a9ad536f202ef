"""Sources are mixed by weight: shares, order and resumed order follow from the seed alone."""

import numpy as np
import pytest

from moe_jax.train import batches, open_documents, survey
from moe_jax.train.data.mixing import endless, epoch
from moe_jax.train.data.packing import PADDING
from tests.helpers import tiny


def source(folder, name, number):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(number)))
    return file


def test_without_weights_all_documents_are_shuffled_together(tmp_path):
    a, b = source(tmp_path, "a", 30), source(tmp_path, "b", 10)
    documents = open_documents([a, b])
    assert len(documents) == 40 and documents[35]["text"] == "b 5" and [part.documents for part in documents.parts] == [30, 10]
    order = endless(documents, 3)
    assert sorted(order[i]["document"] for i in range(40)) == list(range(40))
    assert {order[i]["text"][0] for i in range(12)} == {"a", "b"}
    fingerprints = [open_documents(data).fingerprint for data in ([a, b], [b, a], a, [f"{a},weight=1", f"{b},weight=1"])]
    assert len(set(fingerprints)) == 4 and fingerprints[2] == open_documents([a]).fingerprint


def test_weights_are_shares_of_the_documents(tmp_path):
    """A source goes round all its documents before one comes again."""
    documents = open_documents([f"{source(tmp_path, 'a', 90)},weight=3", f"{source(tmp_path, 'b', 10)},weight=1"])
    order = endless(documents, 5)
    drawn = [order[i]["document"] for i in range(200)]
    for begin in (0, 100):
        assert sum(index < 90 for index in drawn[begin : begin + 100]) == 75
    times = np.bincount(drawn, minlength=100)
    assert set(times[:90]) == {1, 2} and (times[90:] == 5).all()
    assert {index < 90 for index in drawn[:20]} == {index < 90 for index in drawn[80:100]} == {False, True}
    assert drawn[:100] != drawn[100:200] and sorted(epoch(documents, 5)) == sorted(drawn[:100])
    again = endless(documents, 5)
    assert drawn[150:160] == [again[i]["document"] for i in range(150, 160)]


def test_a_mixture_continues_where_it_was(tmp_path):
    documents = open_documents([f"{source(tmp_path, 'a', 90)},weight=0.3", f"{source(tmp_path, 'b', 20)},weight=0.7"])

    def stream(rows=None):
        return batches(documents, tiny.tokenizer(), seq_len=12, batch_size=64, seed=2, rows=rows)

    whole, half = stream(), stream(range(32))
    for _ in range(2):
        batch, own = next(whole), next(half)
        assert all(np.array_equal(batch[name][:32], own[name][:32]) for name in PADDING)
    again = stream()
    again.set_state(whole.get_state())
    expected, found = next(whole), next(again)
    assert all(np.array_equal(expected[name], found[name]) for name in PADDING)
    # Both streams of rows have both sources.
    assert all(set(np.unique(batch["document"][rows] < 90)) == {False, True} for rows in (slice(32), slice(32, 64)))
    for each in (whole, half, again):
        each.close()


def test_the_survey_counts_an_epoch_of_the_mixture(tmp_path):
    documents = open_documents([f"{source(tmp_path, 'a', 90)},weight=1", f"{source(tmp_path, 'b', 10)},weight=1"])
    found = survey(documents, tiny.tokenizer(), seq_len=64)
    # Ten texts of "b 0" five times, and 50 of the 90 of "a", most with a two-digit number; a token ends each.
    assert found.of_source[0] + found.of_source[1] == found.tokens and found.of_source[1] == 50 * 4
    assert 50 * 4 < found.of_source[0] <= 50 * 5 and found.documents == 100


@pytest.mark.parametrize(
    "texts, message",
    [
        (["a.jsonl,weight=0.5"], "is the only source, so its weight has no effect"),
        (["a.jsonl,weight=0.5", "b.jsonl"], "b.jsonl has no weight, and .*a.jsonl has one; give all sources a weight, or none"),
        (["a.jsonl,weight=0", "b.jsonl,weight=1"], "weight must be a number greater than 0; got '0'"),
        (["a.jsonl,wieght=1"], "'wieght=1' is no option; options are weight=..., format=..., split=...,"),
        (["a.jsonl,format=csv"], "format must be one of auto, chat, text, .*; got 'csv'"),
        (["a.jsonl,split=train"], "split is for data sets of the hub, and '.*a.jsonl' is no id such as owner/name"),
        (["a.jsonl,weight=1000", "b.jsonl,weight=0.1"], "no document in an epoch of 13; give a larger weight"),
        ([], "no data: give a file, a folder or"),
    ],
)
def test_wrong_sources_are_named(tmp_path, texts, message):
    source(tmp_path, "a", 9), source(tmp_path, "b", 4)
    with pytest.raises(ValueError, match=message):
        endless(open_documents([f"{tmp_path}/{text}" for text in texts]), 0)


def test_a_source_has_a_format_of_its_own(tmp_path):
    (tmp_path / "pairs.csv").write_text("prompt,completion\nhi,yes\n")
    documents = open_documents([f"{tmp_path}/pairs.csv,format=continuation", f"{tmp_path}/pairs.csv"])
    assert documents.layouts == ("continuation", "pairs") and documents.format == "mixed"


def test_a_path_with_a_comma_is_a_path(tmp_path):
    assert len(open_documents(source(tmp_path, "a,weight=b", 3))) == 3
