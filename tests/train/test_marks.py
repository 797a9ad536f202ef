"""Answers that a chat template marks: their places and their weights, for marks in any place."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moe_jax.train.data.chat import chat_tokens
from tests.helpers import tiny

BEGIN, END = "{% generation %}", "{% endgeneration %}"
MARKED = f"{BEGIN}{{{{ m.content }}}}<|im_end|>{END}"
TURN = f"<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{MARKED}{{% else %}}{{{{ m.content }}}}{{% endif %}}|\n"


def each(turn):
    """A template of a turn for each message."""
    return f"{{% for m in messages %}}{turn}{{% endfor %}}"


def of_answers(marked):
    """A template that writes questions, and answers as `marked`."""
    return each(f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ m.content }}}}|{{% endif %}}")


def question(content="2 + 2?"):
    return {"role": "user", "content": content}


def answer(content, weight=1.0, **more):
    return {"role": "assistant", "content": content, "weight": weight, **more}


def learned(template, *messages):
    """Returns the texts that are learned, with their weights; neighbours of one weight are one text."""
    tokenizer = tiny.tokenizer(template)
    tokens, weights = chat_tokens(tokenizer, list(messages))
    edges = np.flatnonzero(np.diff(weights.astype(np.float32), prepend=0, append=0))
    pairs = zip(edges[:-1], edges[1:], strict=True)
    return [(tokenizer.decode(tokens[a:b]), float(weights[a])) for a, b in pairs if weights[a]]


@pytest.mark.parametrize(
    "begin, end",
    [
        (BEGIN, END),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("\n  {% generation %}\n", "\n  {% endgeneration %}\n"),
        ("\n  {%- generation %}\n  ", "\n  {%- endgeneration %}\n"),
        ("\n  {%generation-%}\n", "\n  {% endgeneration -%}\n  "),
        (BEGIN + "{% set said = m.content %}" + BEGIN, END + "{{ said }}" + END),
    ],
)
def test_the_tokens_and_the_mask_are_those_of_transformers(begin, end):
    tokenizer = tiny.tokenizer(each(TURN.replace(BEGIN, begin).replace(END, end)))
    chat = [question(), answer(" 4, \n"), question("sure?\n"), answer("yes")]
    options = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    expected = tokenizer.apply_chat_template(chat, **options)
    tokens, mask = chat_tokens(tokenizer, chat)
    np.testing.assert_array_equal(tokens, expected["input_ids"])
    np.testing.assert_array_equal(mask, np.asarray(expected["assistant_masks"], bool))
    assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro turn(m) %}" + TURN + "{% endmacro %}" + each("{{ turn(m) }}"),
        each("{% set turn %}" + TURN + "{% endset %}{{ turn }}"),
        each("{% filter string %}" + TURN + "{% endfilter %}"),
    ],
    ids=["macro", "set", "filter"],
)
def test_marks_hold_behind_other_text_of_their_block(template):
    """There transformers notes the beginning of the block."""
    assert learned(template, question(), answer("four"), question(), answer("yes")) == [
        ("four<|im_end|>", 1),
        ("yes<|im_end|>", 1),
    ]


def test_the_last_character_is_learned_whole():
    """An emoji is four tokens here, and transformers marks one of them."""
    assert learned(of_answers(f"{BEGIN}{{{{ m.content }}}}{END}|"), question(), answer("so 😀")) == [("so 😀", 1)]


TWICE = of_answers(f"{BEGIN}{{{{ m.content }}}}{END}|{BEGIN}{{{{ m.content }}}}{END}|")
REASONED = of_answers(f"{BEGIN}{{{{ m.reasoning }}}}{END}|{BEGIN}{{{{ m.content }}}}{END}|")
SPOKEN = f"{BEGIN}{{{{ m.content }}}}{END}"


@pytest.mark.parametrize(
    "template, messages, expected",
    [
        (TWICE, [question(), answer("four", 0.5), question(), answer("", 2)], [("four", 0.5), ("four", 0.5)]),
        (TWICE, [question(), answer("four", 0.5), question(), answer("ok", 2)], [("four", 0.5)] * 2 + [("ok", 2)] * 2),
        (REASONED, [question(), answer("four", 0, reasoning="two and two"), question(), answer("", reasoning="")], []),
        (of_answers(SPOKEN), [question(), answer("four", 0.5), answer("(yes)", 2)], [("four", 0.5), ("(yes)", 2)]),
        (
            of_answers(SPOKEN + "|").replace("in messages", "in messages|reverse"),
            [question(), answer("four", 0.5), question(), answer("yes", 2)],
            [("yes", 2), ("four", 0.5)],
        ),
        # An empty answer has no words to be known by, and one span.
        (each(TURN), [question(), answer("", 0.5), question(), answer("yes", 2)], [("<|im_end|>", 0.5), ("yes<|im_end|>", 2)]),
        # The end of a turn has a mark of its own: it belongs to the answer that it touches.
        (
            of_answers(SPOKEN + f"{BEGIN}<|im_end|>{END}|"),
            [question(), answer("four", 0.5), question(), answer("yes", 2)],
            [("four<|im_end|>", 0.5), ("yes<|im_end|>", 2)],
        ),
        # Reasoning that the template takes out of the content.
        (
            of_answers(
                "{% set parts = m.content.split('</think>') %}"
                f"{BEGIN}{{{{ parts[0].split('<think>')[-1].strip('\\n') }}}}{END}|"
                f"{BEGIN}{{{{ parts[-1].lstrip('\\n') }}}}{END}|"
            ),
            [question(), answer("<think>\nso it is\n</think>\n\n4.", 0.5), question(), answer("<think>hm</think>yes", 2)],
            [("so it is", 0.5), ("4.", 0.5), ("hm", 2), ("yes", 2)],
        ),
    ],
    ids=["twice and none", "twice each", "weight 0", "side by side", "backwards", "empty", "end of turn", "reasoning"],
)
def test_each_span_has_the_weight_of_its_answer(template, messages, expected):
    assert learned(template, *messages) == expected


@pytest.mark.parametrize(
    "template, message",
    [
        (f"{BEGIN}{each('{{ m.content }}|')}{END}", "marks 1 spans for 2 answers, and span 1 has words of 2 of them"),
        (
            of_answers(f"{BEGIN}<|im_start|>{END}|{SPOKEN}|"),
            "marks 4 spans for 2 answers, and span 1 has words of none of them",
        ),
        (of_answers(f"{{% set said %}}{BEGIN}{{{{ m.content }}}} {END}{{% endset %}}{{{{ said | trim }}}}|"), "changes text"),
        (of_answers(f"{{% set said %}}{SPOKEN}{{% endset %}}{{{{ said[:-1] }}}}|"), "changes text"),
    ],
    ids=["one span", "header", "trimmed", "cut"],
)
def test_spans_of_unknown_weight_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        learned(template, question(), answer("four", 0.5), question(), answer("yes", 2))


def test_marks_may_depend_on_other_entries_of_a_message():
    template = each(f"{{% if m.channel == 'final' %}}{SPOKEN}|{{% else %}}{{{{ m.content }}}}|{{% endif %}}")
    chat = [question(), answer("hm", 0.5, channel="thought"), answer("four", 2, channel="final")]
    assert learned(template, *chat) == [("four", 2)]


def test_marks_that_depend_on_words_are_refused_with_weights():
    template = of_answers(f"{{% if 'I cannot' in m.content %}}{{{{ m.content }}}}{{% else %}}{SPOKEN}{{% endif %}}|")
    chat = [question(), answer("four"), answer("I cannot say"), answer("yes")]
    assert learned(template, *chat) == [("four", 1), ("yes", 1)]
    chat[0:2] = [question(), answer("four", 0)]
    with pytest.raises(ValueError, match="reads the words of answers"):
        learned(template, *chat)


@pytest.mark.parametrize("content", ["x\ufdd0\ufdd1", "\U00100185 and \U0010fffd", "\U000f0000"])
def test_a_conversation_may_have_the_signs(content):
    chat = [question(content), answer(content + " four", 0.5), question(), answer("yes", 2)]
    assert learned(of_answers(SPOKEN + "|"), *chat) == [(content + " four", 0.5), ("yes", 2)]


@pytest.mark.parametrize(
    "template, chat",
    [
        # The first answer has two marks, the second none.
        (
            each(f"{{% if loop.index == 2 %}}{SPOKEN}|{BEGIN}<|im_end|>{END}{{% else %}}{{{{ m.content }}}}{{% endif %}}|"),
            [question(), answer("four", 0), question(), answer("yes", 1)],
        ),
        # A header touches the answer before it and its own.
        (of_answers(f"{BEGIN}<|im_start|>{END}{SPOKEN}"), [question(), answer("four", 0.5), answer("yes", 2)]),
        # Both answers have no words, and the first has two marks.
        (TWICE, [question(), answer("<br>", 0.5), question(), answer("", 2)]),
    ],
    ids=["none of its own", "between two", "no words"],
)
def test_spans_without_words_that_may_be_anothers_are_refused(template, chat):
    with pytest.raises(ValueError, match="has words of none of them"):
        learned(template, *chat)


def test_threads_render_side_by_side():
    """The streams of a large batch tokenize in threads. Places that transformers notes belong to all of them together."""
    tokenizer = tiny.tokenizer(each(TURN))
    chats = [[question(), answer(f"{i} " * 40), question(), answer("yes")] * 4 for i in range(16)]
    expected = [chat_tokens(tokenizer, chat)[1].sum() for chat in chats]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda chat: chat_tokens(tokenizer, chat)[1].sum(), chats))
    finally:
        sys.setswitchinterval(interval)
    assert found == expected
