"""Rows of every known layout become conversations, texts or continuations; other rows are named with what would be right."""

import json

import numpy as np
import pytest

from moe_jax.train import open_documents
from moe_jax.train.data.report import describe_sources
from moe_jax.train.data.tokenization import tokenization
from tests.helpers import tiny

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SYSTEM = {"role": "system", "content": "be brief"}
ROWS = {
    "alpaca": ({"instruction": "hello", "input": "", "output": "hi"}, CHAT),
    "alpaca, all keys": (
        {"instruction": "a", "input": "b", "output": "c", "system": "be brief", "history": [["hello", "hi"]]},
        [SYSTEM, *CHAT, {"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}],
    ),
    "dolly": (
        {"instruction": "a", "context": "b", "response": "hi", "category": "x"},
        [{"role": "user", "content": "a\n\nb"}, CHAT[1]],
    ),
    "sharegpt": ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, CHAT),
    "sharegpt, weights": (
        {
            "system": "be brief",
            "conversations": [{"from": "user", "value": "hello"}, {"from": "gpt", "value": "hi", "weight": 1}],
        },
        [SYSTEM, CHAT[0], CHAT[1] | {"weight": 1}],
    ),
    "sharegpt, OpenAI's turns": ({"conversations": CHAT}, CHAT),
    "sharegpt, tools": (
        {
            "tools": '[{"name": "add"}]',
            "conversations": [
                {"from": "human", "value": "1 + 1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "2."},
            ],
        },
        [
            {"role": "user", "content": "1 + 1?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2."},
        ],
    ),
    "pairs": ({"prompt": "hello", "completion": "hi"}, CHAT),
    "pairs of questions": ({"question": "hello", "answer": "hi"}, CHAT),
    "pairs of messages": (
        {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]},
        [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT],
    ),
    "chat in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"text": "lo"}]}, CHAT[1]]},
        CHAT,
    ),
    "chat, Axolotl's train": (
        {"messages": [CHAT[0], *(CHAT[1] | {"train": False} | weight for weight in ({}, {"weight": 0.5})), *CHAT]},
        [CHAT[0], *[CHAT[1] | {"weight": 0}] * 2, *CHAT],
    ),
    "chat, ms-swift's loss": (
        {
            "messages": [
                *CHAT,
                *(CHAT[i] | {"loss": True, "train": i == 0} for i in range(2)),
                CHAT[0],
                CHAT[1] | {"loss": True},
            ]
        },
        [*CHAT, CHAT[0] | {"weight": 1}, CHAT[1] | {"weight": 0}, CHAT[0], CHAT[1] | {"weight": 1}],
    ),
    "chat, null keys": (
        {"messages": [message | {"weight": None, "loss": None, "tool_calls": None} for message in CHAT]},
        CHAT,
    ),
}


def write(folder, *rows, name="data.jsonl"):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_conversations(tmp_path, name):
    row, messages = ROWS[name]
    documents = open_documents(write(tmp_path, row))
    assert documents.layouts == (name.split()[0].strip(",").replace("dolly", "alpaca"),)
    assert documents.format == "chat" and documents[0]["messages"] == messages
    assert ("tools" in row) == ("tools" in documents[0])


def test_tools_of_a_table_are_json(tmp_path):
    documents = open_documents(write(tmp_path, {"messages": CHAT, "tools": '["add"]'}, {"messages": CHAT, "tools": None}))
    assert documents[0]["tools"] == ["add"] and "tools" not in documents[1]


def test_a_continuation_is_two_texts(tmp_path):
    """The prompt is not learned. The chat template takes no part."""
    documents = open_documents(write(tmp_path, {"prompt": "2 + 2 =", "completion": " 4"}), "continuation")
    assert documents.format == "text"
    tokenizer = tiny.tokenizer_with_a_beginning()
    tokens, learned, _ = tokenization(documents, tokenizer)(documents[0])
    assert tokenizer.decode(tokens) == "<|im_start|>2 + 2 = 4<|end|>" and tokenizer.decode(tokens[learned]) == " 4<|end|>"


def test_each_file_has_a_layout_of_its_own(tmp_path):
    write(tmp_path, {"text": "plain"}, name="a.jsonl")
    write(tmp_path, {"id": 7, **ROWS["sharegpt"][0]}, name="b.jsonl")
    documents = open_documents(tmp_path)
    assert documents.format == "mixed" and documents.layouts == ("text", "sharegpt")
    assert documents.parts[0].unread == ("id",) and documents.is_chat.tolist() == [False, True]
    read = tokenization(documents, tiny.tokenizer())
    assert [int(read(documents[i]).learned.sum()) for i in range(2)] == [len("plain") + 1, len("hi") + 1]


def test_keys_of_messages_that_only_a_template_reads_are_named(tmp_path):
    """Keys count if they have a value and the chat template does not mention them."""
    turns = [{"from": "human", "value": "a", "mood": "calm", "other": None}, {"from": "gpt", "value": "b", "rating": 5}]
    documents = open_documents(write(tmp_path, {"conversations": turns, "id": 7}))
    assert documents.parts[0].unread == ("id", "messages.mood", "messages.rating")
    (line,) = describe_sources(documents, template="{{ message.mood }}")
    assert line.endswith("; keys that are not read: id, messages.rating")


def test_a_named_format_wins(tmp_path):
    file = write(tmp_path, {"text": "x", "prompt": "hello", "completion": "hi"})
    assert open_documents(file).format == "text" and open_documents(file, "pairs")[0]["messages"] == CHAT
    with pytest.raises(ValueError, match='data.jsonl:1: needs an object with the keys "instruction" and "output"; it has'):
        open_documents(file, "alpaca")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"foo": 1}, r'has no known layout; a row needs "messages" \(chat\), .*; it has the keys foo'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "holds a preference .chosen, rejected."),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 0 is \"from\" 'robot'; known are human, user, gpt"),
        ({"conversations": [{"who": "x"}]}, 'turn 0 must have the keys "from" and "value"'),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, r"turn 0 \(function_call\) must be JSON of"),
        ({"conversations": "x"}, '"conversations" must be a list of objects'),
        ({"instruction": "a", "output": " "}, '"output" is empty, so there is nothing to learn from'),
        ({"instruction": 3, "output": "b"}, '"instruction" must be a string; it is a int'),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, r'"history" must be a list of \[question, answer\]'),
        ({"prompt": "a", "completion": ""}, '"completion" is empty'),
        ({"prompt": CHAT, "completion": CHAT[:1]}, "no assistant message, or all of weight 0"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"data.jsonl:1: {message}"):
        open_documents(write(tmp_path, row))


def test_equal_problems_are_said_once(tmp_path):
    file = write(tmp_path, {"text": "good"}, *[{"other": 1}] * 3, {"text": 3})
    with pytest.raises(ValueError) as error:
        open_documents(file)
    assert str(error.value) == (
        f'bad training data (text): {file}:2: needs an object with the key "text"; it has the keys other (the same in 2 more); '
        f'{file}:5: "text" must be a string; it is a int; --skip-bad-documents leaves them out, and counts them'
    )
    with pytest.raises(ValueError, match=r"data.jsonl:1: has no known .* the keys other \(the same in all 12\)$"):
        open_documents(write(tmp_path, *[{"other": 1}] * 12))


def test_bad_rows_are_skipped_and_counted(tmp_path):
    file = write(tmp_path, [1], {"messages": CHAT}, {"messages": 3}, {"messages": CHAT})
    documents = open_documents(file, skip_bad=True)
    assert len(documents) == 2 and documents.line.tolist() == [2, 4] and documents.num_bad == 2
    assert f"{file}:1: needs an object" in documents.bad and f"{file}:3: " in documents.bad
    with pytest.raises(ValueError, match="bad training data"):
        open_documents(write(tmp_path, [1]), skip_bad=True)


def test_only_the_last_turn_is_learned(tmp_path):
    """A turn may call tools, and may be followed by a question without an answer."""
    call = {"role": "assistant", "content": "", "tool_calls": ["add"]}
    chat = [*CHAT, CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[1], {"role": "user", "content": "bye"}]
    file = write(tmp_path, {"messages": chat}, {"messages": CHAT})
    all_of_it, last = open_documents(file), open_documents(file, learned_answers="last")
    assert [message.get("weight", 1) for message in last[0]["messages"]] == [1, 0, 1, 1, 1, 1, 1]
    assert last[1]["messages"] == CHAT and all_of_it[0]["messages"] == chat
    assert last.fingerprint != all_of_it.fingerprint
    tokenizer = tiny.tokenizer()
    documents = open_documents(write(tmp_path, {"messages": [*CHAT, *CHAT]}), learned_answers="last")
    tokens, learned, _ = tokenization(documents, tokenizer)(documents[0])
    assert tokenizer.decode(tokens[learned]) == "hi<|im_end|>" and np.flatnonzero(learned)[0] > len(tokens) // 2
    with pytest.raises(ValueError, match="learned_answers must be one of all, last; got 'first'"):
        open_documents(file, learned_answers="first")
