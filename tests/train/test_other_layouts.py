"""Alpaca, ShareGPT and the like are refused once, with code that converts them."""

import json

import pytest

from moe_jax.train import open_documents

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
LAYOUTS = {
    "Alpaca": {"instruction": "hello", "input": "", "output": "hi"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
    "prompt/completion": {"prompt": "hello", "completion": "hi"},
    "chat": {"messages": CHAT},
}
FURTHER = {
    "OpenAI's turns": ("chat", {"conversations": CHAT}),
    "TRL's messages": ("prompt/completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json"])
def test_the_printed_code_converts_the_data(tmp_path, monkeypatch, name, ending):
    if name == "chat" and ending != "json":
        return
    rows, file = [LAYOUTS[name]] * 10, tmp_path / f"data.{ending}"
    text = json.dumps(rows) if ending == "json" else "\n".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8-sig")
    with pytest.raises(ValueError, match=f"This is {name} data. To convert it to chats") as error:
        open_documents(file)
    said, code = str(error.value).split(":\n\n")
    assert said.count("needs an object") <= 1
    monkeypatch.chdir(tmp_path)
    exec(code)
    documents = open_documents(tmp_path / "chats.jsonl")
    assert len(documents) == 10 and documents[9]["messages"] == CHAT


@pytest.mark.parametrize("name", FURTHER)
def test_messages_under_other_names_are_moved(tmp_path, monkeypatch, name):
    layout, row = FURTHER[name]
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"This is {layout} data. To convert it to chats") as error:
        open_documents(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split(":\n\n")[1])
    assert open_documents(tmp_path / "chats.jsonl")[0]["messages"] == CHAT


def test_keys_that_the_code_leaves_out_are_named(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(LAYOUTS["Alpaca"] | {"system": "be brief", "history": []}) + "\n")
    with pytest.raises(ValueError, match=r"To convert it to chats \(without system, history\):"):
        open_documents(tmp_path / "data.jsonl")


def test_the_code_does_not_write_over_what_it_reads(tmp_path, monkeypatch):
    file = tmp_path / "chats.jsonl"
    file.write_text(before := json.dumps(LAYOUTS["ShareGPT"]) + "\n")
    with pytest.raises(ValueError, match="To convert it to chats") as error:
        open_documents(file)
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split(":\n\n")[1])
    assert file.read_text() == before and open_documents(tmp_path / "converted.jsonl")[0]["messages"] == CHAT


def test_the_code_keeps_what_stands_beside_the_messages(tmp_path, monkeypatch):
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"messages": CHAT, "tools": ["add"]}]))
    with pytest.raises(ValueError, match="To convert it to chats") as error:
        open_documents(file)
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split(":\n\n")[1])
    assert open_documents(tmp_path / "chats.jsonl")[0]["tools"] == ["add"]


def test_equal_problems_are_said_once(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + '{"other": 1}\n' * 3 + '{"text": 3}\n')
    with pytest.raises(ValueError) as error:
        open_documents(file)
    assert str(error.value) == (
        f'bad training data (text): {file}:2: needs an object with the key "text" (or, in all lines, "messages" for chats); it '
        f'has the keys other (the same in 2 more); {file}:5: "text" must be a string; it is a int'
    )
    file.write_text('{"other": 1}\n' * 12)
    with pytest.raises(ValueError, match=r"a.jsonl:1: needs .* it has the keys other \(the same in all 12\)$"):
        open_documents(file)
