"""Data sets of the hub are opened by id, whole or as a stream; a local folder replaces the hub here."""

import sys

import numpy as np
import pytest

from moe_jax.train import batches, open_documents
from tests.helpers import tiny

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two splits of owner/name; asks for them are recorded."""
    for split, number in {"train": 20, "test": 3}.items():
        rows = [{"question": f"{split} {i}", "answer": "yes", "source": None} for i in range(number)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    load, asked = datasets.load_dataset, []

    def load_local(path, revision=None, **options):
        asked.append(options)
        if path != "owner/name":
            raise datasets.exceptions.DatasetNotFoundError(path)
        return load(str(tmp_path), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_local)
    return asked


def test_a_split_is_read_by_index(hub):
    documents = open_documents("owner/name,split=test")
    assert len(documents) == 3 and documents[2]["messages"][0]["content"] == "test 2"
    assert documents.where(2) == "owner/name (test) row 3" and documents.parts[0].unread == ("source",)
    assert documents.files == () and hub[0]["streaming"] is False
    assert open_documents("owner/name").fingerprint != documents.fingerprint


def test_the_first_rows_come_as_a_stream(hub):
    whole, first = open_documents("owner/name"), open_documents("owner/name,take=5")
    assert len(whole) == 20 and len(first) == 5 and hub[1]["streaming"] is True
    assert [first[i] for i in range(5)] == [whole[i] for i in range(5)]
    assert open_documents("owner/name,take=5").fingerprint == first.fingerprint != whole.fingerprint


@pytest.mark.parametrize("option", ["take=3", "stream=true"])
def test_pictures_in_a_stream_are_not_decoded(tmp_path, monkeypatch, option):
    """Broken ones are next to the text that is read."""
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"text": f"words {i}", "image": {"bytes": b"broken", "path": None}} for i in range(3)]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "train.parquet")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda _, revision, **options: load(str(tmp_path), **options))
    documents = open_documents(f"owner/name,{option}")
    assert documents[2]["text"] == "words 2" and documents.parts[0].unread == ("image",)


def test_options_of_a_data_set_arrive(monkeypatch):
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return datasets.Dataset.from_list([{"text": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    documents = open_documents("owner/name,config=german,split=test,revision=0a1b")
    options = dict(name="german", split="test", revision="0a1b", streaming=False)
    assert asked == [("owner/name", options)] and documents.where(0) == "owner/name (german, test) row 1"


@pytest.mark.parametrize("take", [3, 5])
def test_a_stream_reads_no_further_rows(take, monkeypatch):
    made = []

    def rows():
        for i in range(1000):
            made.append(i)
            yield {"question": f"train {i}", "answer": "yes", "picture": b"bytes"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: stream)
    documents = open_documents(f"owner/name,take={take}")
    assert len(documents) == take <= len(made) <= take + 1 and documents.parts[0].unread == ("picture",)
    assert documents[take - 1]["messages"][0]["content"] == f"train {take - 1}" and len(made) <= take + 1


def test_batches_of_a_table_are_the_same_each_time(hub):
    """Threads of several streams read it."""
    streams = [batches(open_documents("owner/name"), tiny.tokenizer(), seq_len=32, batch_size=64) for _ in range(2)]
    first, second = map(next, streams)
    assert all(np.array_equal(first[name], second[name]) for name in first) and first["loss_mask"].any(axis=1).all()
    for stream in streams:
        stream.close()


def test_a_missing_data_set_or_split_is_named(hub):
    with pytest.raises(FileNotFoundError, match="no data at owner/other: neither a file or folder here, nor a data set"):
        open_documents("owner/other")
    with pytest.raises(
        ValueError,
        match=r"owner/name is no file .* of this name on the hub cannot be read \(split=valid, .*train.*split=...,config",
    ):
        open_documents("owner/name,split=valid")


def test_without_the_package_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.parquet").touch()
    for data in ("owner/name", tmp_path / "a.parquet"):
        with pytest.raises(ImportError, match=r"is read by the package datasets: pip install 'moe_jax\[data\]'$"):
            open_documents(data)


def test_data_on_disk_needs_no_further_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert len(open_documents(tmp_path)) == 1
