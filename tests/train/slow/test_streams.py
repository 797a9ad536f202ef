"""A data set of the hub as a stream: its rows in their order, once each, from any position; a local generator is the hub."""

import json
import sys

import numpy as np
import pytest

from moe_jax.train import batches, open_documents, survey
from moe_jax.train.data import hub
from tests.helpers import tiny

datasets = pytest.importorskip("datasets")


@pytest.fixture
def made(monkeypatch):
    """The numbers of rows that are made, of 50; the first three rows are looked at."""
    numbers = []

    def rows():
        for i in range(50):
            numbers.append(i)
            yield {"question": f"row {i} " + "x" * (i % 7), "answer": f"{i}" * (1 + i % 3), "picture": b"bytes"}

    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: datasets.IterableDataset.from_generator(rows))
    monkeypatch.setattr(hub, "FIRST_ROWS", 3)
    return numbers


def stream_of(documents, **options):
    return batches(documents, tiny.tokenizer(), seq_len=96, **{"batch_size": 2, **options})


def documents_of(batch):
    return batch["document"][batch["document"] >= 0]


def test_the_first_rows_are_surveyed(made):
    documents = open_documents("owner/name,stream=true")
    first = open_documents("owner/name,take=3")
    assert max(made) <= 3 and documents.is_stream and documents.parts[0].unread == ("picture",)
    assert survey(documents, tiny.tokenizer(), seq_len=96) == survey(first, tiny.tokenizer(), seq_len=96)
    assert [documents[i] for i in range(3)] == [first[i] for i in range(3)] and documents.fingerprint != first.fingerprint
    assert documents[40]["messages"][0]["content"].startswith("row 40 ") and documents.where(40) == "owner/name (train) row 41"


@pytest.mark.parametrize("batch_size", [2, 64])
def test_rows_come_in_order_round_after_round(made, batch_size, caplog):
    """Each row is made once a round, also for many rows of a batch."""
    documents = open_documents("owner/name,stream=true")
    made.clear()
    stream = stream_of(documents, batch_size=batch_size)
    seen = set()
    while not set(range(60)) <= seen:
        seen |= set(documents_of(next(stream)).tolist())
    stream.close()
    assert made == [i % 50 for i in range(len(made))]
    assert "owner/name (train) has ended, and begins again" in caplog.text


@pytest.mark.parametrize("steps", [1, 4, 30])
def test_a_restored_position_continues_the_rows(made, steps, monkeypatch):
    """In another process, also in a later round, and where rows are no longer kept."""
    monkeypatch.setattr(hub, "KEPT_ROWS", 5)
    monkeypatch.setattr(hub, "MARKED_ROWS", 7)
    first, second = (stream_of(open_documents("owner/name,stream=true")) for _ in range(2))
    for _ in range(steps):
        next(first)
    begin = json.dumps(first.get_state())
    second.set_state(json.loads(begin))
    expected = [next(first) for _ in range(20)]
    first.set_state(json.loads(begin))
    for stream in (first, second):
        for batch in expected:
            actual = next(stream)
            for name in batch:
                np.testing.assert_array_equal(actual[name], batch[name])
        stream.close()


def test_a_run_that_continues_skips_rows_by_the_state(tmp_path, monkeypatch):
    """The first of three Parquet files is not opened again."""
    monkeypatch.setattr(hub, "MARKED_ROWS", 50)
    for file, begin in ("a", 0), ("b", 300), ("c", 600):
        rows = [{"text": f"text {i} " + "x" * 70} for i in range(begin, begin + 300)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{file}.parquet")
    load = datasets.load_dataset
    files = {"train": [str(tmp_path / f"{file}.parquet") for file in "abc"]}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, name, revision, **options: load("parquet", data_files=files, **options)
    )
    first, second = (stream_of(open_documents("owner/name,stream=true"), batch_size=32) for _ in range(2))
    while documents_of(next(first)).min() < 700:
        pass
    position, expected = first.get_state(), next(first)
    assert 650 <= position["mark"]["row"] <= 800
    (tmp_path / "a.parquet").unlink()
    second.set_state(position)
    np.testing.assert_array_equal(next(second)["tokens"], expected["tokens"])


def of_rows(rows, fails=(), most_rounds=10_000):
    """Rows as the hub's stream; those in `fails` lose the connection, and all of them after `most_rounds`."""
    rounds = []

    def make():
        rounds.append(1)
        if len(rounds) > most_rounds:
            raise OSError(f"more than {most_rounds} rounds")
        for number, row in enumerate(rows):
            if number in fails:
                raise OSError("connection lost")
            yield row

    return lambda path, **options: datasets.IterableDataset.from_generator(make)


def test_bad_rows_are_named_or_left_out(monkeypatch):
    """After the first rows too; blank rows are no documents."""
    rows = [{"text": "good"}] * 2 + [{"text": "  "}, {"text": 3}] + [{"text": "more"}]
    monkeypatch.setattr(datasets, "load_dataset", of_rows(rows))
    monkeypatch.setattr(hub, "FIRST_ROWS", 2)
    stream = stream_of(open_documents("owner/name,stream=true"))
    with pytest.raises(ValueError, match=r'owner/name \(train\) row 4: "text" must be a string; it is a int; --skip-bad-doc'):
        next(stream)
    stream = stream_of(open_documents("owner/name,stream=true"), skip_bad=True)
    assert {i % 5 for i in documents_of(next(stream)).tolist()} == {0, 1, 4}
    assert stream.skipped[3].startswith("owner/name (train) row 4: ")


REFUSING = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('refused') }}{% endif %}" + tiny.CHATML


def chats_of(monkeypatch, *asked, **options):
    """Returns a function that gives batches of a stream of chats with these questions; one row is inspected."""
    answer = {"role": "assistant", "content": "a"}
    rows = [{"messages": [{"role": "user", "content": question}, answer]} for question in asked]
    monkeypatch.setattr(datasets, "load_dataset", of_rows(rows, **options))
    monkeypatch.setattr(hub, "FIRST_ROWS", 1)
    documents = open_documents("owner/name,stream=true")
    return lambda: batches(documents, tiny.tokenizer(REFUSING), seq_len=96, batch_size=1, skip_bad=True)


@pytest.mark.parametrize("position", [0, 30, 70])
def test_a_round_without_a_usable_row_ends_a_stream(monkeypatch, position, caplog):
    """For any restored position; the next attempt ends too."""
    monkeypatch.setattr(sys.modules["moe_jax.train.data.tokenization"], "MANY_ROWS", 45)
    stream = chats_of(monkeypatch, *["bad"] * 50, most_rounds=20)()
    if position:
        state = stream.get_state()
        innermost = state["0"]
        while "parent" in innermost:
            innermost = innermost["parent"]
        innermost["next_index"] = position
        stream.set_state(state)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"^nothing to learn: all 50 documents that were read of owner/name are left out; the last: owner/name "
            r"\(train\) row \d+: .* refuses the first 2 messages: refused; give a chat template that takes such conversations",
        ):
            next(stream)
    assert f"the last 45 rows were left out; the last: owner/name (train) row {position + 45}: " in caplog.text
    # Threads read ahead while the error is on its way. A stream that does not end has 1,000 rows.
    assert max(stream.skipped) < position + 300
    stream.close()


@pytest.mark.parametrize("good", [0, 2, 4])
def test_a_stream_of_mostly_refused_rows_goes_on(monkeypatch, good):
    make = chats_of(monkeypatch, *("good" * 15 if i == good else "bad" for i in range(5)))
    stream, resumed = make(), make()
    for _ in range(3):
        assert {i % 5 for i in documents_of(next(stream)).tolist()} == {good}
    resumed.set_state(json.loads(json.dumps(stream.get_state())))
    np.testing.assert_array_equal(next(resumed)["tokens"], next(stream)["tokens"])
    for each in (stream, resumed):
        each.close()


def test_a_failing_network_is_named(monkeypatch):
    """The next attempt continues after the rows that came."""
    fails = set()
    monkeypatch.setattr(datasets, "load_dataset", of_rows([{"text": f"text {i}"} for i in range(30)], fails))
    monkeypatch.setattr(hub, "FIRST_ROWS", 2)
    documents = open_documents("owner/name,stream=true")
    fails.add(20)
    assert documents[19]["text"] == "text 19"
    with pytest.raises(ValueError, match=r"owner/name \(train\): row 21 cannot be read: connection lost"):
        documents[20]
    fails.clear()
    assert documents[20] == {"text": "text 20", "document": 20} and documents[3]["text"] == "text 3"


@pytest.mark.parametrize(
    "data, message",
    [
        (
            ["owner/name,stream=true", "a.jsonl"],
            "cannot be combined with other sources: leave one of both out; take=N alone reads",
        ),
        (["owner/name,stream=true,take=3"], "cannot be combined with take=3"),
        (["owner/name,stream=1"], "stream must be true, or left out; got '1'"),
        (["a.jsonl,stream=true"], "stream is for data sets of the hub"),
    ],
)
def test_refused_streams(data, message):
    with pytest.raises(ValueError, match=message):
        open_documents(data)
