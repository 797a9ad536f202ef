"""The text of answers that a chat template marks with `{% generation %}`.

Signs are printed at the marks, and read off the rendered text. transformers notes places while it renders. They are wrong
behind other text of a macro or a block, and where two threads render at once.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from moe_jax.train.data.turns import KEYS

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ANY_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_WORD = re.compile(r"(?:^|(?<=[\s>\]▷]))[^\s<\[◁]")
"""The first character of a word. Tags such as `</think>` or `[/THINK]`, which templates look for, are not words."""
_TEXTS = ("content", *KEYS, "tool_calls")
"""Entries of a message that hold an answer's text."""
_FIXED = ("role", "type", "id")
"""Entries inside of them that templates compare."""


class Span(NamedTuple):
    """Text to learn: its first character, the end, and the weight of its tokens."""

    first: int
    end: int
    weight: float


class _Mark(NamedTuple):
    """Marked text: its first character, the end, and the numbers of the answers that it has words of."""

    first: int
    end: int
    answers: frozenset[int]


class _Signs(NamedTuple):
    """Characters that a conversation does not have."""

    begin: str
    end: str
    plane: int
    """The code point of the first answer's sign; the others follow."""

    def of_answer(self, number: int) -> str:
        return chr(self.plane + number)


def marked_spans(template: str, messages: list[dict[str, Any]], render: Callable[..., str]) -> tuple[str, list[Span]]:
    """Returns the rendered conversation and its marked spans, in order. Marks within marks are one span.

    Args:
      render: renders messages with the template, or with the one in `chat_template`.

    Raises:
      ValueError: the template changes the text behind its marks. Or answers differ in weight, and it cannot be told whose text
        a span is.
    """
    text, weights = render(messages), weights_of_answers(messages)
    signs = _free_signs(text)
    at_marks = _with_signs_at_marks(template, signs.begin, signs.end)
    marks = _marks(render(messages, chat_template=at_marks), signs, text)
    if marks is None:
        raise ValueError(
            "the chat template changes text that it marks with {% generation %}, so the assistant's tokens cannot be found; "
            "put the marks around the text as it is written"
        )
    if len(set(weights)) <= 1:
        return text, [Span(mark.first, mark.end, weights[0] if weights else 1) for mark in marks if mark.first < mark.end]
    signed, has_words = _with_signs(messages, signs)
    found = _marks(render(signed, chat_template=at_marks), signs, text)
    # A template may mark by the words themselves: then the marks of the answers as they are hold, and no others.
    if found is None or [mark[:2] for mark in found] != [mark[:2] for mark in marks]:
        raise ValueError(
            "the chat template reads the words of answers, so the weights of those that it marks with {% generation %} cannot "
            "be told; leave weights out, or use a template that writes answers as they are"
        )
    return text, _spans(found, weights, has_words)


def weights_of_answers(messages: list[dict[str, Any]]) -> list[float]:
    """Returns the weights of a conversation's answers; 1 for those without one."""
    return [message.get("weight", 1) for message in messages if message["role"] == "assistant"]


def _free_signs(text: str) -> _Signs:
    """Returns signs that are not in the text: code points without characters, and a plane for private use."""
    free = [chr(point) for point in range(0xFDD0, 0xFDF0) if chr(point) not in text]
    planes = [first for first in (0x100000, 0xF0000) if not re.search(f"[{chr(first)}-{chr(first + 0xFFFD)}]", text)]
    if len(free) < 2 or not planes:
        raise ValueError("the conversation has characters of both private planes of Unicode; remove those of one")
    return _Signs(free[0], free[1], planes[0])


@lru_cache
def _with_signs_at_marks(template: str, begin: str, end: str) -> str:
    """Returns a template that prints signs inside of its marks; white space is trimmed as before."""

    def signed(tag: re.Match[str]) -> str:
        left, is_end, right = tag.groups()
        # A block, as the mark is: Jinja trims line breaks behind blocks, and not behind printed values.
        sign = "{%% if true %%}{{ '%s' }}{%% endif %%}" % (end if is_end else begin)
        if is_end:
            return sign.replace("{%", "{%" + left, 1) + "{% endgeneration " + right + "%}"
        return "{%" + left + " generation %}" + sign.removesuffix("%}") + right + "%}"

    return _ANY_TAG.sub(signed, template)


def _with_signs(messages: list[dict[str, Any]], signs: _Signs) -> tuple[list[dict[str, Any]], list[bool]]:
    """Returns messages whose answers have a sign in each word, and for each answer whether it has words."""
    signed, has_words = [], list[bool]()
    for message in messages:
        if message["role"] == "assistant":
            sign = signs.of_answer(len(has_words))
            own = message | {key: _signed(message[key], sign) for key in _TEXTS if key in message}
            has_words.append(own != message)
            message = own
        signed.append(message)
    return signed, has_words


def _signed(value: Any, sign: str) -> Any:
    if isinstance(value, str):
        return _WORD.sub(lambda word: word[0] + sign, value)
    if isinstance(value, dict):
        return {key: inner if key in _FIXED else _signed(inner, sign) for key, inner in value.items()}
    return [_signed(inner, sign) for inner in value] if isinstance(value, list) else value


def _marks(rendered: str, signs: _Signs, text: str) -> list[_Mark] | None:
    """Returns the marks of a rendering with signs; None if a mark has no end or beginning, or the rest is not the text."""
    parts = re.split(f"([{signs.begin}{signs.end}{signs.of_answer(0)}-{signs.of_answer(0xFFFD)}])", rendered)
    if "".join(parts[::2]) != text:
        return None
    marks, depth, first, place, answers = list[_Mark](), 0, 0, 0, set[int]()
    for i, part in enumerate(parts):
        if i % 2 == 0:
            place += len(part)
        elif part == signs.begin:
            first, answers = (first, answers) if depth else (place, set())
            depth += 1
        elif part == signs.end:
            depth -= 1
            if depth < 0:
                return None
            marks += [] if depth else [_Mark(first, place, frozenset(answers))]
        else:
            answers.add(ord(part) - signs.plane)
    return None if depth else marks


def _spans(marks: list[_Mark], weights: list[float], has_words: list[bool]) -> list[Span]:
    """Returns the marked spans with the weights of their answers.

    If each answer has one mark, a mark without words is that of an answer without words. Otherwise a span without words
    belongs to the spans that it touches: the end of a turn, say.
    """
    spans = [mark for mark in marks if mark.first < mark.end]
    if [mark.answers for mark in marks] == [frozenset([i] if has else []) for i, has in enumerate(has_words)]:
        pairs = zip(marks, weights, strict=True)
        return [Span(mark.first, mark.end, weight) for mark, weight in pairs if mark.first < mark.end]
    found = list[Span]()
    for group in _touching(spans):
        around = {weights[i] for mark in group for i in mark.answers}
        for mark in group:
            of_mark = {weights[i] for i in mark.answers} or around
            if len(of_mark) != 1:
                raise ValueError(
                    f"the chat template marks {len(spans)} spans for {len(weights)} answers, and span {len(found) + 1} has "
                    f'words of {len(mark.answers) or "none"} of them, so the answers that have a "weight" cannot be found; '
                    "mark each answer by itself, or leave weights out"
                )
            found.append(Span(mark.first, mark.end, *of_mark))
    return found


def _touching(spans: list[_Mark]) -> list[list[_Mark]]:
    """Returns groups of spans with nothing between them."""
    begins = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(spans)) if before.end < after.first), len(spans)]
    return [spans[a:b] for a, b in pairwise(begins)]
