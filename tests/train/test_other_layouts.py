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


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_the_code_that_the_error_prints_converts_the_data(tmp_path, monkeypatch, name, ending):
    if (name, ending) == ("chat", "jsonl"):
        return
    rows, file = [LAYOUTS[name]] * 10, tmp_path / f"data.{ending}"
    file.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=f"This is {name} data. To convert it to chats") as error:
        open_documents(file)
    said, code = str(error.value).split(":\n\n")
    assert said.count("needs an object") <= 1
    monkeypatch.chdir(tmp_path)
    exec(code)
    documents = open_documents(tmp_path / "chats.jsonl")
    assert len(documents) == 10 and documents[9]["messages"] == CHAT


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
