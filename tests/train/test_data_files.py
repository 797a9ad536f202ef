"""Each file of a data set is read in a fixed order, or named as left out; nothing is skipped in silence."""

import json
import os

import pytest

from moe_jax.train import open_documents


def write_line(path, **record):
    path.write_text(json.dumps(record) + "\n")


def test_links_to_folders_are_followed_and_loops_are_named(tmp_path, caplog):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "b", elsewhere / "deep", elsewhere / ".hidden"):
        folder.mkdir(parents=True)
    for file in (data / "a.txt", data / "z.txt", data / "b/c.txt", elsewhere / "deep/d.txt", elsewhere / ".hidden/x"):
        file.write_text(file.name)
    (data / "m").symlink_to(elsewhere)
    (data / "y.txt").symlink_to(elsewhere / "deep" / "d.txt")
    (elsewhere / "back").symlink_to(data)
    documents = open_documents(data)
    assert [documents[i]["text"] for i in range(len(documents))] == ["a.txt", "c.txt", "d.txt", "d.txt", "z.txt"]
    assert f"left out of the training data: {data}/m/back" in caplog.text


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="links in .* that lead nowhere: .*gone.txt; mend or remove them"):
        open_documents(tmp_path)


def test_without_links_the_fingerprint_is_the_old_one(tmp_path):
    """Existing runs have stored it."""
    for name in ("b/2.txt", "b-/1.txt", "a.txt", "b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = open_documents(tmp_path)
    assert [documents[i]["text"] for i in range(4)] == ["a.txt", "b/2.txt", "b-/1.txt", "b.txt"]
    assert documents.fingerprint == "ddd5cf29e0cd45e0c6d7d5d51c9c723d"


def test_files_that_a_format_leaves_out_are_named(tmp_path, caplog):
    write_line(tmp_path / "a.jsonl", text="x")
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b")
    os.mkfifo(tmp_path / "pipe")
    assert len(open_documents(tmp_path, "text")) == 1
    assert f"left out of the training data: {tmp_path}/b.jsonl.gz, {tmp_path}/pipe" in caplog.text


def test_the_first_line_of_any_file_shows_the_format(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    write_line(tmp_path / "b.JSONL", messages=[{"role": "assistant", "content": "x"}])
    assert open_documents(tmp_path).format == "chat"


@pytest.mark.parametrize("name, advice", [("x.jsonl.gz", "gunzip"), ("x.txt.zst", "unzstd")], ids=["one file", "in a folder"])
def test_compressed_data_is_refused_with_advice(tmp_path, name, advice):
    """The error names the command that unpacks the file."""
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    path = tmp_path / name if ".jsonl" in name else tmp_path
    with pytest.raises(ValueError, match=rf"compressed data .*: .*{name}; unpack it first \({advice} .*{name}\)"):
        open_documents(path)


def test_data_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/null", tmp_path / "pipe.jsonl"):
        with pytest.raises(
            ValueError, match=f"the data at {path} is a pipe or a device, .* write them to a regular file first"
        ):
            open_documents(path)
