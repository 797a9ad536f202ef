"""The text of answers that a chat template marks with `{% generation %}`.

The template is changed to print signs at the marks, which are then found in the rendered text. transformers instead records
positions while rendering. Those are wrong after other text of a macro or block, and if two threads render at once.
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
"""Keys of a message that hold an answer's text."""
_FIXED = ("role", "type", "id")
"""Keys inside them whose values templates compare."""


class Span(NamedTuple):
    """A span of rendered text to learn: start and end character, and the weight of its tokens."""

    first: int
    end: int
    weight: float


class _Mark(NamedTuple):
    """Marked text: its first character, its end, and the numbers of the answers whose words it contains."""

    first: int
    end: int
    answers: frozenset[int]


class _Signs(NamedTuple):
    """Characters that do not occur in a conversation."""

    begin: str
    end: str
    plane: int
    """The code point of the first answer's sign; the others follow."""

    def of_answer(self, number: int) -> str:
        return chr(self.plane + number)


def marked_spans(template: str, messages: list[dict[str, Any]], render: Callable[..., str]) -> tuple[str, list[Span]]:
    """Renders a conversation; returns the text and the spans that the template marks, in order. Nested marks are merged.

    Args:
      render: renders messages with the template, or with the one in `chat_template`.

    Raises:
      ValueError: the template changes the text in its marks. Or answers differ in weight, and a span cannot be attributed to an
        answer.
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
    # A template may choose marks by the words themselves: then only the marks of the original answers are valid.
    if found is None or [mark[:2] for mark in found] != [mark[:2] for mark in marks]:
        raise ValueError(
            "the chat template reads the words of answers, so the weights of those that it marks with {% generation %} cannot "
            "be told; leave weights out, or use a template that writes answers as they are"
        )
    return text, _spans(found, weights, has_words)


def weights_of_answers(messages: list[dict[str, Any]]) -> list[float]:
    """Returns the loss weight of each assistant message; 1 by default."""
    return [message.get("weight", 1) for message in messages if message["role"] == "assistant"]


def _free_signs(text: str) -> _Signs:
    """Returns signs that do not occur in the text: unassigned code points, and a private-use plane."""
    free = [chr(point) for point in range(0xFDD0, 0xFDF0) if chr(point) not in text]
    planes = [first for first in (0x100000, 0xF0000) if not re.search(f"[{chr(first)}-{chr(first + 0xFFFD)}]", text)]
    if len(free) < 2 or not planes:
        raise ValueError("the conversation has characters of both private planes of Unicode; remove the characters of one")
    return _Signs(free[0], free[1], planes[0])


@lru_cache
def _with_signs_at_marks(template: str, begin: str, end: str) -> str:
    """Returns a template that prints signs inside its marks; white space is trimmed as before."""

    def signed(tag: re.Match[str]) -> str:
        left, is_end, right = tag.groups()
        # A block, like the mark: Jinja trims line breaks after blocks, but not after printed values.
        sign = "{%% if true %%}{{ '%s' }}{%% endif %%}" % (end if is_end else begin)
        if is_end:
            return sign.replace("{%", "{%" + left, 1) + "{% endgeneration " + right + "%}"
        return "{%" + left + " generation %}" + sign.removesuffix("%}") + right + "%}"

    return _ANY_TAG.sub(signed, template)


def _with_signs(messages: list[dict[str, Any]], signs: _Signs) -> tuple[list[dict[str, Any]], list[bool]]:
    """Returns messages whose answers have a sign in each word, and True for each answer with words."""
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
    """Returns the marks of a rendering with signs; None if a mark is incomplete, or the rest differs from the text."""
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

    If each answer has one mark, a mark without words belongs to an answer without words. Otherwise a span without words, such
    as the end of a turn, belongs to the adjacent spans.
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
    """Returns groups of adjacent spans."""
    begins = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(spans)) if before.end < after.first), len(spans)]
    return [spans[a:b] for a, b in pairwise(begins)]
