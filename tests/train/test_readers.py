"""Rows of JSON lists, tables and Parquet are read by their place, and bad ones are named."""

import json

import numpy as np
import pytest

from moe_jax.train import open_documents

TEXTS = ["first", 'zweite, "Zeile"\nund dritte \N{GRINNING FACE}', "last"]
LIST = json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False)


def texts(documents):
    return [documents[i]["text"] for i in reversed(range(len(documents)))][::-1]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    "name, content",
    [
        ("a.json", LIST),
        ("a.json", LIST.replace("\n", "")),
        ("a.json", "\n\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)),
        ("a.JSON", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)),
        ("a.csv", 'id,text\r\n1,first\r\n2,"zweite, ""Zeile""\nund dritte \N{GRINNING FACE}"\r\n\r\n3,last\r\n'),
        ("a.tsv", 'text\tid\nfirst\t1\n"zweite, ""Zeile""\nund dritte \N{GRINNING FACE}"\t2\nlast\t3'),
    ],
    ids=["list", "one line", "objects", "lines", "csv", "tsv"],
)
def test_files_of_rows(tmp_path, name, content, encoding):
    file = tmp_path / name
    file.write_bytes(content.encode(encoding))
    documents = open_documents(file)
    assert texts(documents) == TEXTS
    if name == "a.csv":
        assert documents.line.tolist() == [2, 3, 6] and documents.parts[0].unread == ("id",)
        assert documents.where(1).startswith(f"{file}:3 (byte ")
    if content == LIST:
        assert documents.line.tolist() == [2, 5, 8] and documents.parts[0].unread == ()
    assert documents.fingerprint == open_documents(file).fingerprint
    file.write_bytes(content.encode(encoding) + b"\n")
    with pytest.raises(ValueError, match=f"changed while it was in use: {file}"):
        documents[0]


def test_a_parquet_file_is_read_by_rows(tmp_path):
    """Messages of a table have all keys of all messages; those without a value are dropped."""
    datasets = pytest.importorskip("datasets")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "weight": 1}]
    rows = [{"messages": chat, "picture": b"\x00"}, {"messages": chat[:1] + [{"role": "assistant", "content": "no"}]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    documents = open_documents(tmp_path)
    assert [documents[i]["messages"] for i in range(2)] == [row["messages"] for row in rows]
    assert documents.parts[0].unread == ("picture",) and documents.where(1) == f"{tmp_path}/a.parquet row 2"
    assert documents.fingerprint == open_documents(tmp_path / "a.parquet").fingerprint
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match="b.parquet: not readable as Parquet: "):
        open_documents(tmp_path)


def test_a_saved_data_set_is_read_by_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3]}).save_to_disk(tmp_path / "saved")
    documents = open_documents(tmp_path / "saved")
    assert texts(documents) == TEXTS and documents.where(2) == f"{tmp_path}/saved row 3"
    assert documents.files == (tmp_path / "saved",)


def test_a_folder_holds_files_of_several_kinds(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("prompt,completion\nhi,yes\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "hi", "completion": "no"}\n')
    (tmp_path / "c.json").write_text('[{"prompt": "hi", "completion": "ok"}]')
    documents = open_documents(tmp_path)
    assert [documents[i]["messages"][1]["content"] for i in range(3)] == ["yes", "no", "ok"]
    (tmp_path / "settings.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="holds .jsonl files and others, such as settings.json: data_format chat, text or"):
        open_documents(tmp_path)
    assert len(open_documents(tmp_path, "pairs")) == 3 and f"left out of the training data: {tmp_path}/settings" in caplog.text
    (tmp_path / "b.jsonl").unlink()
    assert open_documents(tmp_path).format == "folder"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", '[{"text": "x"},\n {"text"}]', "a.json:2: not JSON, so the rest cannot be read: Expecting ':' delimiter"),
        ("a.json", '[{"text": "x"},\n', "a.json:2: the list has no end, so the file was cut"),
        ("a.json", b"[\xff]", "a.json: not UTF-8 text: invalid start byte at byte 1"),
        ("a.json", '[{"text": "x"}, 3]', 'a.json:1: needs an object with the key "text"; it has a int'),
        ("a.json", '{"text": "cut \\ud83d"}', r"a.json:1: not valid Unicode"),
        ("a.csv", "text,id\nx,1\ny\n", "a.csv:3: has 1 fields, and the first line names 2"),
        ("a.csv", 'text\n"x', "a.csv:2: not CSV, so the rest cannot be read: unexpected end of data"),
        ("a.csv", "text,text\nx,y\n", "a.csv:1: the first line must name the columns, each by another name"),
        ("a.csv", b"text\n\xff\n", "a.csv:2: not UTF-8 text: invalid start byte"),
        ("a.csv", "title,body\nx,y\n", "bad training data: .*a.csv:2: has no known layout.*the keys title, body"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        open_documents(tmp_path / name)


def test_a_short_row_of_a_table_is_skipped(tmp_path):
    (tmp_path / "a.csv").write_text("text,id\nx,1\ny\n,2\nz,3\n")
    documents = open_documents(tmp_path / "a.csv", skip_bad=True)
    assert texts(documents) == ["x", "z"] and documents.num_bad == 1 and np.array_equal(documents.line, [2, 5])
