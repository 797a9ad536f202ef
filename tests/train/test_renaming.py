"""Columns of any name are read as keys of a layout, if the source names them."""

import json

import pytest

from moe_jax.train import open_documents

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
NAMES = "prompt=Question,completion=The answer"


def test_columns_are_read_under_their_keys(tmp_path):
    datasets = pytest.importorskip("datasets")
    row = {"id": 1, "Question": "hello", "The answer": "hi"}
    (tmp_path / "a.csv").write_text("id,Question,The answer\n1,hello,hi\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "c.json").write_text(json.dumps([row]))
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "d.parquet")
    for path in (*tmp_path.iterdir(), tmp_path):
        documents = open_documents(f"{path},{NAMES}")
        assert len(documents) == (4 if path == tmp_path else 1)
        assert all(documents[i]["messages"] == CHAT for i in range(len(documents)))
        assert documents.parts[0].unread == ("id",) and documents.layouts[0] == "pairs"
    with pytest.raises(ValueError, match="a.csv:2: has no known layout; .*; other columns are named as in FILE,prompt=COLUMN,"):
        open_documents(tmp_path / "a.csv")


def test_mistyped_columns(tmp_path):
    """The message names the column that is missing, and all that there are."""
    (tmp_path / "a.tsv").write_text("id\tQuestion\tAnswer\n1\thello\thi\n")
    (tmp_path / "b.jsonl").write_text('{"Question": "a", "note": "x"}\n{"Question": "a", "Answer": "b"}\n')
    with pytest.raises(ValueError, match=r"a.tsv: no column 'Quest'; it has id, Question, Answer$"):
        open_documents(f"{tmp_path}/a.tsv,prompt=Quest,completion=Answer")
    with pytest.raises(ValueError, match=r"b.jsonl: no column 'Q' and no 'A'; it has Question, note, Answer$"):
        open_documents(f"{tmp_path}/b.jsonl,prompt=Q,completion=A")
    with pytest.raises(
        ValueError, match=r'b.jsonl:1: needs an object with the keys "prompt" and "completion"; it has the keys'
    ):
        open_documents(f"{tmp_path}/b.jsonl,prompt=Question,completion=Answer")


def test_names_may_be_swapped_and_are_part_of_the_fingerprint(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "hi", "completion": "hello"}\n')
    plain, swapped = open_documents(file), open_documents(f"{file},prompt=completion,completion=prompt")
    assert swapped[0]["messages"] == CHAT and plain.fingerprint != swapped.fingerprint
    documents = open_documents([f"{file},format=text,text=prompt", file])
    assert documents[0]["text"] == "hi" and documents.where(0) == f"{file}:1 (byte 0)"


def test_bad_rows_and_texts_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "hi", "a": "yes"}\n{"q": "hi"}\n{"q": \n')
    message = r'a.jsonl:2: needs an object with the keys "prompt" and "completion"; it has the keys prompt; .*:3: not JSON'
    with pytest.raises(ValueError, match=message):
        open_documents(f"{tmp_path}/a.jsonl,prompt=q,completion=a")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="texts holds texts, and prompt name columns of rows; leave them out"):
        open_documents(f"{tmp_path}/texts,prompt=q")
