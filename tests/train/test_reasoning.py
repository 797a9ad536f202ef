"""Reasoning before an answer is learned, counted where a template leaves it out, and refused where it never reads it."""

import json

import pytest
import tiny

from moe_jax.train import open_documents, survey
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.description import describe_tokens

# Qwen3's way: thoughts stand in the turns behind the last question alone.
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
