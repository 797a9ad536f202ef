"""Folders, texts and chats become batches; bad input is named with its file and line."""

import json
import os

import numpy as np
import pytest
from tokenizers import processors

from moe_jax.train import batches, open_documents
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.tokenization import beginning, tokenization
from tests.helpers import tiny

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "bye"},
]
# Qwen3's own template does this: the last assistant turn alone gets an (empty) block of thoughts.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)
# Qwen3's too: a line break is between content and tool calls, where there is content.
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}{% if m['content'] %}{{ '\n' }}{% endif %}"
    "<tool_call>{{ m['tool_calls'][0] }}</tool_call>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{{ raise_exception('no tools here') }}"
RENDERED = "<|im_start|>user: 2 + 2?\nmodel: 4."
COUNTING = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}<|im_end|>{% endfor %}"


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_folder_gives_its_text_files_in_order(tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path / "texts" / "deep").parent)
    assert len(documents) == 9 and documents.where(3).endswith("3.txt")
    assert documents[3]["text"].startswith("text 3:")


def test_lines_of_text_are_read_by_their_place(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"text": "first"}, "", {"text": "zweite Zeile"}, {"text": "third"})
    documents = open_documents(file)
    assert [documents[i]["text"] for i in (2, 0, 1)] == ["third", "first", "zweite Zeile"]
    assert documents.where(1) == f"{file}:3 (byte 19)"


def test_the_fingerprint_depends_on_contents_and_format(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"messages": CHAT, "text": "x"})
    kinds = [open_documents(tmp_path, kind).fingerprint for kind in ("auto", "chat", "text", "folder")]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3
    write_lines(tmp_path / "a.jsonl", {"messages": CHAT, "text": "y"})
    assert open_documents(tmp_path).fingerprint not in kinds


def test_a_line_may_have_a_key_named_document(tmp_path):
    assert open_documents(write_lines(tmp_path / "a.jsonl", {"text": "x", "document": "b.pdf"}))[0]["document"] == 0


@pytest.mark.parametrize("change", ["written to", "removed", "with its old time"])
def test_a_file_that_changed_since_it_was_opened_is_named(tmp_path, change):
    file = write_lines(tmp_path / "a.jsonl", {"text": "first"}, {"text": "second"})
    documents = open_documents(tmp_path)
    if change == "removed":
        file.unlink()
    else:
        file.write_text("x" * file.stat().st_size if change == "with its old time" else "x")
    if change == "with its old time":
        os.utime(file, ns=(0, documents.readers[0].stamp[1]))
    message = f"changed while it was in use: {file} is not as it was when it was opened .document {file}:2 .byte 18.."
    with pytest.raises(ValueError, match=message):
        documents[1]


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (("a.jsonl", '{"text": "x"}\n{"text": "y"}\n'), ("texts/b.txt", "x"), ("texts/c.txt", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    lines, files = open_documents(tmp_path / "a.jsonl"), open_documents(tmp_path / "texts")
    assert [lines[i]["text"] for i in range(2)] == ["x", "y"]
    assert len(files) == 1 and files[0]["text"] == "x"


def test_white_space_alone_is_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("\u00a0\u3000\n")
    (tmp_path / "b.txt").write_text("b")
    assert len(open_documents(tmp_path)) == 1
    assert len(open_documents(write_lines(tmp_path / "c.jsonl", {"text": "\u00a0\u3000"}, {"text": "b"}))) == 1


def test_files_that_are_not_utf_8_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16-le"))
    with pytest.raises(
        ValueError,
        match="a.txt: holds NUL bytes, so it is no UTF-8 text; convert UTF-16 with iconv .* files of Parquet .parquet",
    ):
        open_documents(tmp_path)
    (tmp_path / "a.txt").write_bytes("hell\u00f6".encode("latin-1"))
    with pytest.raises(ValueError, match="a.txt: not UTF-8 text: invalid start byte at byte 4"):
        open_documents(tmp_path)


@pytest.mark.parametrize(
    "template, said",
    [
        (tiny.CHATML, "hi there<|im_end|>bye<|im_end|>"),
        (THINKING, "hi there<|im_end|><think>\n\n</think>\n\nbye<|im_end|>"),
        (MARKED, "hi there<|im_end|>bye<|im_end|>"),
    ],
    ids=["chatml", "thinking", "marked"],
)
def test_a_chat_trains_on_what_the_assistant_says_and_its_end(template, said):
    tokenizer = tiny.tokenizer(template)
    tokens, trained = chat_tokens(tokenizer, CHAT)
    assert tokenizer.decode(tokens[trained]) == said
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("content, said", [(None, ""), ("", ""), ("let me see", "let me see\n")])
def test_a_chat_trains_on_tool_calls_with_and_without_content(content, said):
    chat = [*CHAT[:2], {"role": "assistant", "content": content, "tool_calls": ["add"]}, *CHAT[3:]]
    tokenizer = tiny.tokenizer(CALLING)
    tokens, trained = chat_tokens(tokenizer, chat)
    assert tokenizer.decode(tokens[trained]) == f"{said}<tool_call>add</tool_call><|im_end|>bye<|im_end|>"


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_of_weight_0_is_not_learned(template):
    tokenizer = tiny.tokenizer(template)
    _, both = chat_tokens(tokenizer, CHAT)
    for i, said in (2, "bye<|im_end|>"), (4, "hi there<|im_end|>"):
        weighted = [{**message, "weight": 0} if j == i else message for j, message in enumerate(CHAT)]
        tokens, trained = chat_tokens(tokenizer, weighted)
        assert tokenizer.decode(tokens[trained]) == said and (both & trained == trained).all()
    without = [{**message, "weight": None} for message in CHAT]
    np.testing.assert_array_equal(chat_tokens(tokenizer, without)[1], both)


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_has_its_weight(template):
    tokenizer = tiny.tokenizer(template)
    _, both = chat_tokens(tokenizer, CHAT)
    tokens, weights = chat_tokens(tokenizer, [*CHAT[:2], {**CHAT[2], "weight": 0.25}, CHAT[3], {**CHAT[4], "weight": 3}])
    assert weights.dtype == np.float32 and tokenizer.decode(tokens[weights == 0.25]) == "hi there<|im_end|>"
    assert tokenizer.decode(tokens[weights == 3]) == "bye<|im_end|>" and ((weights != 0) == both).all()


@pytest.mark.parametrize("change, tools, left_out", [({"tool_calls": ["add"]}, None, "tool_calls"), ({}, ["add"], "tools")])
def test_a_template_that_would_leave_tools_out_is_refused(change, tools, left_out):
    chat = [*CHAT[:2], {**CHAT[2], **change}, *CHAT[3:]]
    with pytest.raises(ValueError, match=f"the chat template would leave out {left_out}: it never mentions them"):
        chat_tokens(tiny.tokenizer(), chat, tools)


@pytest.mark.parametrize("template", [REFUSING, MARKED + REFUSING], ids=["plain", "marked"])
def test_the_refusal_of_a_template_is_quoted(template):
    with pytest.raises(ValueError, match="the tokenizer's chat template refuses the first 5 messages: no tools here"):
        chat_tokens(tiny.tokenizer(template), CHAT)


def test_a_leading_answer_needs_a_template_with_marks():
    with pytest.raises(ValueError, match="begins with the assistant's message.*; put a system or user message first"):
        chat_tokens(tiny.tokenizer(), CHAT[2:])
    tokenizer = tiny.tokenizer(MARKED)
    tokens, trained = chat_tokens(tokenizer, CHAT[2:])
    assert tokenizer.decode(tokens[trained]) == "hi there<|im_end|>bye<|im_end|>"


@pytest.mark.parametrize(
    "lines, message",
    [
        (["{"], "a.jsonl:1: not JSON"),
        (['{"text": "x", "n": ' + "1" * 5000 + "}"], "a.jsonl:1: not readable JSON: a number of more than 4300 digits"),
        (['{"text": "x", "n": ' + "[" * 10**5 + "]" * 10**5 + "}"], "a.jsonl:1: not readable JSON: .* nested too deeply"),
        (["[1]"], "it has a list"),
        (
            [{"prompt": "x"}],
            r'a row needs "messages" \(chat\), "text" \(text\), .*"completion" \(pairs\).*it has the keys prompt',
        ),
        ([{"text": 3}], '"text" must be a string; it is a int'),
        ([{"text": "x"}, {"other": "y"}], 'a.jsonl:2: needs an object with the key "text"'),
        (
            [{"text": "fine \N{GRINNING FACE}"}, {"text": "cut \ud83d"}],
            r"a.jsonl:2: not valid Unicode: the escape \\ud83d alone is",
        ),
        ([{"messages": [{**CHAT[2], "content": "cut \udca9"}]}], r"a.jsonl:1: not valid Unicode: the escape \\udca9 alone"),
        ([{"text": "   "}], "no document with any text"),
        ([{"messages": "hi"}], '"messages" must be a list'),
        ([{"messages": [{"role": "robot", "content": "x"}]}], "message 0 has the role 'robot'"),
        ([{"messages": [{"role": "user", "content": 3}]}], r'message 0 \(user\) needs a string "content"'),
        (
            [{"messages": [*CHAT, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}],
            r'message 5 has a part of "content" that is no text \(image_url\)',
        ),
        ([{"messages": CHAT[:2]}], "no assistant message"),
        ([{"messages": [{**message, "weight": 0} for message in CHAT]}], "no assistant message, or all of weight 0"),
        ([{"messages": [{**message, "train": "false"} for message in CHAT]}], "message 0 has \"train\" 'false'; it is true or"),
        ([{"messages": [{**message, "loss": 0.5} for message in CHAT]}], 'message 0 has "loss" 0.5; it is true or false'),
        *[
            (
                [{"messages": CHAT}, {"messages": [*CHAT, {**CHAT[2], "weight": weight}]}],
                rf'a.jsonl:2: .* has "weight" {named};',
            )
            for weight, named in (
                (-0.5, "-0.5"),
                (float("nan"), "nan"),
                (float("inf"), "inf"),
                ("2", "'2'"),
                (2e18, "2e.18"),
                (1e39, "1e.39"),
                (10**40, "10+"),
                (8e-19, "8e-19"),
                (1e-40, "1e-40"),
            )
        ],
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        open_documents(write_lines(tmp_path / "a.jsonl", *lines))


def test_a_mixed_folder_needs_a_named_format(tmp_path):
    """The folder holds .jsonl files and others."""
    (tmp_path / "README.md").write_text("what this is")
    write_lines(tmp_path / "train.jsonl", {"text": "x"})
    with pytest.raises(ValueError, match=r"holds \.jsonl files and others, such as README.md: data_format chat, text or"):
        open_documents(tmp_path)
    assert len(open_documents(tmp_path, "text")) == 1 and len(open_documents(tmp_path, "folder")) == 2


def test_a_folder_of_json_files_of_no_layout_is_text(tmp_path):
    (tmp_path / "a.json").write_text('{"any": "settings"}')
    assert open_documents(tmp_path).format == "folder"


def test_a_single_text_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="a.txt is a single file and no file of rows: give a .jsonl, .*, or a folder"):
        open_documents(tmp_path / "a.txt")


def test_missing_templates_are_refused(tmp_path):
    """So are templates that hide the assistant's tokens."""
    with pytest.raises(ValueError, match="the assistant's tokens cannot be found"):
        chat_tokens(tiny.tokenizer(COUNTING), CHAT)
    documents = open_documents(write_lines(tmp_path / "a.jsonl", {"messages": CHAT}))
    with pytest.raises(ValueError, match="this one has none. Give one with --chat-template FILE"):
        batches(documents, tiny.tokenizer(None), seq_len=8, batch_size=1)


def test_a_text_begins_as_its_tokenizer_begins_a_text(tmp_path):
    documents = open_documents(write_lines(tmp_path / "a.jsonl", {"text": "ab"}))
    plain, begins = tiny.tokenizer(), tiny.tokenizer_with_a_beginning()
    rows = {}
    for name, tokenizer, begin in (("plain", plain, True), ("begins", begins, True), ("left out", begins, False)):
        batch = next(batches(documents, tokenizer, seq_len=5, batch_size=1, begin_texts=begin))
        rows[name] = batch["tokens"][0][batch["segment_ids"][0] == 1].tolist()
    text = plain("ab")["input_ids"]
    assert rows == {"plain": [*text, 0], "begins": [*begins("ab")["input_ids"], 0], "left out": [*text, 0]}
    assert begins("ab")["input_ids"] == [1, *text]
    ends = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)])
    plain.backend_tokenizer.post_processor = ends
    assert beginning(plain) == [] and beginning(begins) == [1]


@pytest.mark.parametrize("behind", ["", "<|end|>", "<|end|>\n"])
@pytest.mark.parametrize(
    "kind, row", [("text", {"text": RENDERED}), ("continuation", {"prompt": RENDERED, "completion": " 4."})]
)
def test_special_tokens_that_a_text_has_are_not_added(tmp_path, kind, row, behind):
    """Chats that were rendered before have the first token of a text, and the last."""
    key = list(row)[-1]
    documents = open_documents(write_lines(tmp_path / "a.jsonl", row | {key: row[key] + behind}), kind)
    tokenizer = tiny.tokenizer_with_a_beginning()
    tokens, learned, _ = tokenization(documents, tokenizer)(documents[0])
    ended = row[key] + (behind or "<|end|>")
    assert tokenizer.decode(tokens) == (ended if kind == "text" else RENDERED + ended)
    assert tokenizer.decode(tokens[learned]) == ended


def test_all_unmaskable_conversations_are_named_at_once(tmp_path):
    good, bad = {"messages": CHAT}, {"messages": CHAT[2:]}
    file = write_lines(tmp_path / "a.jsonl", good, bad, good, *[bad] * 10)
    documents = open_documents(file)
    message = f"11 of 13 conversations begin with the assistant's message.*: {file}:2 .*; {file}:4 .*{file}:12 .*; and 1 more$"
    with pytest.raises(ValueError, match=message):
        batches(documents, tiny.tokenizer(), seq_len=8, batch_size=1)
    batches(documents, tiny.tokenizer(MARKED), seq_len=8, batch_size=1)


def test_a_batch_has_the_documented_layout(tmp_path):
    documents = open_documents(write_lines(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[1:3]}))
    tokenizer = tiny.tokenizer()
    batch = next(batches(documents, tokenizer, seq_len=256, batch_size=2, seed=1))
    for row in range(2):
        one = {name: array[row] for name, array in batch.items()}
        assert one["tokens"].shape == (256,) and (one["document"][one["segment_ids"] == 0] == -1).all()
        for segment in range(1, one["segment_ids"].max() + 1):
            inside = one["segment_ids"] == segment
            tokens, trained = chat_tokens(tokenizer, documents[one["document"][inside][0]]["messages"])
            np.testing.assert_array_equal(one["tokens"][inside], tokens)
            np.testing.assert_array_equal(one["positions"][inside], np.arange(len(tokens)))
            np.testing.assert_array_equal(one["labels"][inside][:-1], tokens[1:])
            np.testing.assert_array_equal(one["loss_mask"][inside], np.append(trained[1:], 0))
