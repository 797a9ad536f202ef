"""Reasoning before an answer is learned, counted where a template leaves it out, and refused where it never reads it."""

import json
import re

import pytest

from moe_jax.train import open_documents, survey
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.report import describe_tokens, report
from tests.helpers import tiny

# Qwen3's way: thoughts are only in the turns after the last question.
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turn(number):
    answer = {"role": "assistant", "content": f"answer {number}", "reasoning_content": f"thought {number}\n"}
    return [{"role": "user", "content": f"question {number}"}, answer]


def test_the_reasoning_of_the_last_turn_is_learned():
    tokenizer = tiny.tokenizer(THINKING)
    tokens, learned = chat_tokens(tokenizer, turn(1) + turn(2))
    assert tokenizer.decode(tokens[learned]) == "answer 1<|im_end|><think>\nthought 2\n</think>\n\nanswer 2<|im_end|>"


@pytest.mark.parametrize("answers, left_out", [("all", 1), ("last", 0)])
def test_answers_without_their_reasoning_are_counted(tmp_path, answers, left_out):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (turn(1) + turn(2), turn(3))))
    documents = open_documents(file, learned_answers=answers)
    found = survey(documents, tiny.tokenizer(THINKING), seq_len=256)
    assert found.without_reasoning == left_out
    said = any("answers are learned without their reasoning" in line for line in describe_tokens(documents, found, 256))
    assert said == bool(left_out)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_template_that_never_reads_it_is_refused(key):
    answer = {"role": "assistant", "content": "hi", key: "thought"}
    with pytest.raises(ValueError, match=f"the chat template would leave out {key}: it never mentions it; give another"):
        chat_tokens(tiny.tokenizer(tiny.CHATML + "{# enable_thinking #}"), [turn(1)[0], answer])
    # Reasoning of an answer that is not learned may be left out, as templates do in earlier turns.
    chat_tokens(
        tiny.tokenizer(),
        [turn(1)[0], answer | {"weight": 0}, {"role": "user", "content": "?"}, turn(1)[1] | {"reasoning_content": ""}],
    )


# DeepSeek-R1's way: the prompt begins the reasoning, and answers are written without theirs.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}"
    "<a>{{ m.content.split('</think>')[-1] }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
# Kimi-K2-Thinking's way: reasoning is written after the last answer that calls no tool.
KIMI = (
    "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set n.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_middle|>{{ m.role }}:"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' if loop.index0 > n.last else '' }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}{% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<|im_middle|>assistant:{% endif %}"
)
CALLS = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
TOOL = [turn(1)[0], turn(1)[1] | CALLS | {"content": ""}, {"role": "tool", "content": "2"}]
PLAIN = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in turn(1)]


def inline(number):
    content = f"<think>\nthought {number}\n</think>\n\nanswer {number}"
    return [turn(number)[0], {"role": "assistant", "content": content}]


def write(tmp_path, *chats):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return file


@pytest.mark.parametrize(
    "template, end",
    [
        (R1, "<e>"),
        ("deepseek_r1_distill", "<｜end▁of▁sentence｜>"),
        ("deepseekv3", "<｜end▁of▁sentence｜>"),
    ],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_answers_may_lack_the_reasoning_of_the_prompt(template, end, turns):
    tokenizer = tiny.tokenizer(template if "{" in template else tiny.trl_template(template))
    chat = [message for number in range(turns) for message in inline(number)]
    expected = [f"answer {number}{end}" for number in range(turns)]
    assert [text.lstrip() for text in tiny.learned(tokenizer, chat)] == expected


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3_5_think"])
def test_answers_continue_the_reasoning_of_the_prompt(name):
    """The last turn has reasoning, which the prompt begins. Earlier turns have none, and no empty block."""
    tokenizer = tiny.tokenizer(tiny.trl_template(name))
    assert tiny.learned(tokenizer, turn(1)) == ["thought 1\n</think>\n\nanswer 1<|im_end|>"]
    first, second = tiny.learned(tokenizer, turn(1) + turn(2))
    assert (first, second) == ("answer 1<|im_end|>", "thought 2\n</think>\n\nanswer 2<|im_end|>")
    called, said, last = tiny.learned(tokenizer, [*TOOL, PLAIN[1], *turn(2)])
    assert called.startswith("<tool_call>") and (said, last) == (first, second)


def test_answers_after_reasoning_that_is_dropped_are_found():
    """Qwen3's template writes the reasoning of a tool call in the last turn alone."""
    tokenizer = tiny.tokenizer(tiny.trl_template("qwen3"))
    called, said, last = tiny.learned(tokenizer, [*TOOL, PLAIN[1], *turn(2)])
    assert called.startswith("<tool_call>") and called.endswith("</tool_call><|im_end|>")
    assert said == "answer 1<|im_end|>" and last == "<think>\nthought 2\n</think>\n\nanswer 2<|im_end|>"


def test_a_refusal_names_reasoning_and_what_helps():
    """Without a header of its own an answer is found by the text before it alone, which lacks reasoning in the whole."""
    template = THINKING.replace("<|im_start|>{{ m['role'] }}\n", "").replace("<|im_start|>assistant\n", "")
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    tokenizer = tiny.tokenizer(template.replace("{{ m['content'] }}", "{{ m['content'] }}" + calls))
    chat = [*TOOL, PLAIN[1], *turn(2)]
    message = (
        "messages before answer 3 differently by themselves than in the whole conversation, because of their reasoning, so the "
        "assistant's tokens cannot be found; --learned-answers last learns the last turn, which can be found; or use a template"
    )
    with pytest.raises(ValueError, match=message):
        chat_tokens(tokenizer, chat)
    last_alone = [message | {"weight": 0} if message in chat[:4] else message for message in chat]
    assert tiny.learned(tokenizer, last_alone) == ["<think>\nthought 2\n</think>\n\nanswer 2<|im_end|>"]


@pytest.mark.parametrize("chat", [turn(1), [*TOOL, turn(1)[1]]], ids=["one turn", "tool call"])
def test_reasoning_that_even_the_last_answer_lacks_is_refused(chat):
    message = re.escape(
        "the chat template leaves out the reasoning (reasoning_content) even of the last answer, so none would ever be "
        "learned; give a template that keeps it, such as --chat-template kimi-k2-thinking, or take it out of the data"
    )
    with pytest.raises(ValueError, match=message):
        chat_tokens(tiny.tokenizer(KIMI), chat)
    without = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in chat]
    assert tiny.learned(tiny.tokenizer(KIMI), without)[-1] == "<think></think>answer 1<e>"


@pytest.mark.parametrize(
    "template, left_out, advice",
    [
        (tiny.CHATML, 0, None),
        (tiny.trl_template("qwen3"), 1, "--learned-answers last learns last turns alone; a template that keeps it"),
        (tiny.trl_template("deepseekv3"), 3, "a template that keeps it"),
        (tiny.trl_template("deepseekv3_training"), 3, "a template that keeps it"),
        (tiny.trl_template("deepseek_r1_distill_training"), 0, None),
    ],
    ids=["chatml", "qwen3", "deepseekv3", "marked", "keeping"],
)
def test_reasoning_that_the_content_loses_is_counted(tmp_path, template, left_out, advice):
    documents = open_documents(write(tmp_path, inline(1) + inline(2), inline(3)))
    tokenizer = tiny.tokenizer(template)
    found = survey(documents, tokenizer, seq_len=512)
    assert found.without_reasoning == left_out
    lines = [line for line in describe_tokens(documents, found, 512) if "without their reasoning" in line]
    assert len(lines) == bool(left_out) and (not lines or f": {advice}" in lines[0])
    printed = [line for line in report(documents, tokenizer, seq_len=512) if line.startswith("without their reasoning")]
    assert len(printed) == bool(left_out) and (not printed or f"{left_out} ({advice}" in printed[0])


def test_a_refusal_names_the_template_that_reads_the_key():
    message = (
        "would leave out reasoning_content: it never mentions it; give another template, such as --chat-template deepseek-r1"
    )
    with pytest.raises(ValueError, match=message):
        chat_tokens(tiny.tokenizer(tiny.trl_template("deepseekv3")), turn(1))


def test_short_reasoning_is_not_taken_for_other_text(tmp_path):
    """The dropped thought "4" is the answer, too."""
    chat = [turn(1)[0], {"role": "assistant", "content": "4", "reasoning_content": "4"}, *turn(2)]
    assert survey(open_documents(write(tmp_path, chat)), tiny.tokenizer(THINKING), seq_len=256).without_reasoning == 1


EMPTY = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "four"}]


@pytest.mark.parametrize(
    "template, block, end",
    [
        (tiny.trl_template("qwen3"), "<think>\n\n</think>\n\n", "<|im_end|>"),
        (tiny.trl_template("qwen3_training"), "<think>\n\n</think>\n\n", "<|im_end|>\n"),
        (tiny.trl_template("qwen3_6"), "\n</think>\n\n", "<|im_end|>"),
        (KIMI, "<think></think>", "<e>"),
    ],
    ids=["qwen3", "marked", "of the prompt", "kimi"],
)
def test_an_empty_think_block_is_learned_or_masked_and_counted(tmp_path, template, block, end):
    tokenizer = tiny.tokenizer(template)
    assert tiny.learned(tokenizer, EMPTY) == [f"{block}four{end}"]
    assert tiny.learned(tokenizer, EMPTY, empty_thinking="mask") == [f"four{end}"]
    for choice, number in ("learn", 1), ("mask", 0):
        documents = open_documents(write(tmp_path, EMPTY), empty_thinking=choice)
        found = survey(documents, tokenizer, seq_len=128)
        assert found.empty_thinking == number
        counted = f"{number} of 1 answers are learned with the empty think block that they begin with: --empty-thinking mask"
        assert any(counted in line for line in describe_tokens(documents, found, 128)) == bool(number)
        printed = any(line.startswith("empty think blocks ") for line in report(documents, tokenizer, seq_len=128))
        assert printed == bool(number)


def test_other_think_blocks_stay_learned():
    """Blocks with reasoning, blocks inside an answer, and the answer after an earlier empty block."""
    tokenizer = tiny.tokenizer(tiny.trl_template("qwen3"))
    written = EMPTY[1] | {"content": "write <think></think> so"}
    assert tiny.learned(tokenizer, turn(1), empty_thinking="mask") == tiny.learned(tokenizer, turn(1))
    plain = tiny.tokenizer()
    assert tiny.learned(plain, [EMPTY[0], written], empty_thinking="mask") == ["write <think></think> so<|im_end|>"]


def test_data_with_masked_blocks_is_other_data(tmp_path):
    file = write(tmp_path, EMPTY)
    learn, mask = (open_documents(file, empty_thinking=choice) for choice in ("learn", "mask"))
    assert learn.fingerprint == open_documents(file).fingerprint != mask.fingerprint
    with pytest.raises(ValueError, match="empty_thinking must be one of learn, mask; got 'drop'"):
        open_documents(file, empty_thinking="drop")
