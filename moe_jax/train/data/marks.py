"""The text of answers that a chat template marks with `{% generation %}`.

Signs are printed at the marks, and read off the rendered text. transformers notes places while it renders. They are wrong
behind other text of a macro or a block, and where two threads render at once.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ANY_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
BEGIN, END = "\ufdd0", "\ufdd1"
"""Signs at marks. Unicode gives these code points no characters."""
FIRST_ANSWER, LAST_ANSWER = "\U00100000", "\U0010fffd"
"""Signs of answers by their number, in a plane of Unicode for private use."""
_WORD = re.compile(r"(?:^|(?<=[\s>]))[^\s<]")
"""The first character of a word. Tags such as `</think>`, which templates look for, are not words."""
_FIXED = ("role", "type", "id")
"""Entries that templates compare, and do not print as the answer's text."""


class Span(NamedTuple):
    """Text to learn: its first character, the end, and the weight of its tokens."""

    first: int
    end: int
    weight: float


class _Marked(NamedTuple):
    """Marked text: its first character, the end, and the numbers of the answers that it has words of."""

    first: int
    end: int
    answers: set[int]


def marked_spans(template: str, messages: list[dict[str, Any]], render: Callable[..., str]) -> tuple[str, list[Span]]:
    """Returns the rendered conversation and its marked spans, in order. Marks within marks are one span.

    Args:
      render: renders messages with the template, or with the one in `chat_template`.

    Raises:
      ValueError: the template changes the text behind its marks. Or answers differ in weight, and a span has text of several
        or of none.
    """
    text, weights = render(messages), weights_of_answers(messages)
    differ = len(set(weights)) > 1
    signed = render(_with_signs(messages) if differ else messages, chat_template=_with_signs_at_marks(template))
    signs = re.compile(f"([{BEGIN}{END}{FIRST_ANSWER}-{LAST_ANSWER}])" if differ else f"([{BEGIN}{END}])")
    spans = _marked(signs.split(signed))
    if spans is None or signs.sub("", signed) != text:
        raise ValueError(
            "the chat template changes text that it marks with {% generation %}, so the assistant's tokens cannot be found; "
            "put the marks around the text as it is written"
        )
    spans = _joined(spans)
    of_spans = _weights([span.answers for span in spans], weights) if differ else (weights[:1] or [1]) * len(spans)
    return text, [Span(span.first, span.end, weight) for span, weight in zip(spans, of_spans, strict=True)]


def weights_of_answers(messages: list[dict[str, Any]]) -> list[float]:
    """Returns the weights of a conversation's answers; 1 for those without one."""
    return [message.get("weight", 1) for message in messages if message["role"] == "assistant"]


@lru_cache
def _with_signs_at_marks(template: str) -> str:
    """Returns a template that prints signs inside of its marks; white space is trimmed as before."""

    def signed(tag: re.Match[str]) -> str:
        left, is_end, right = tag.groups()
        # A block, as the mark is: Jinja trims line breaks behind blocks, and not behind printed values.
        sign = "{%% if true %%}{{ '%s' }}{%% endif %%}" % (END if is_end else BEGIN)
        if is_end:
            return sign.replace("{%", "{%" + left, 1) + "{% endgeneration " + right + "%}"
        return "{%" + left + " generation %}" + sign.removesuffix("%}") + right + "%}"

    return _ANY_TAG.sub(signed, template)


def _with_signs(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose answers have a sign in each word, by which their text is known wherever it stands."""
    signed, number = [], ord(FIRST_ANSWER)
    for message in messages:
        is_answer = message["role"] == "assistant"
        signed.append(_signed(message, chr(number)) if is_answer else message)
        number += is_answer
    return signed


def _signed(value: Any, sign: str) -> Any:
    if isinstance(value, str):
        return _WORD.sub(lambda word: word[0] + sign, value)
    if isinstance(value, dict):
        return {key: inner if key in _FIXED else _signed(inner, sign) for key, inner in value.items()}
    return [_signed(inner, sign) for inner in value] if isinstance(value, list) else value


def _marked(parts: list[str]) -> list[_Marked] | None:
    """Returns the marked text, given text and signs in turn; None if a mark has no end or no beginning."""
    spans, depth, first, place, answers = list[_Marked](), 0, 0, 0, set[int]()
    for i, part in enumerate(parts):
        if i % 2 == 0:
            place += len(part)
        elif part == BEGIN:
            first, answers = (first, answers) if depth else (place, set())
            depth += 1
        elif part == END:
            depth -= 1
            if depth < 0:
                return None
            spans += [] if depth or place == first else [_Marked(first, place, answers)]
        else:
            answers.add(ord(part) - ord(FIRST_ANSWER))
    return None if depth else spans


def _joined(spans: list[_Marked]) -> list[_Marked]:
    """Returns the spans, those without words of an answer joined to one that they touch: the end of a turn, say."""
    joined: list[_Marked] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before and before.end == span.first and not (before.answers and span.answers):
            joined[-1] = _Marked(before.first, span.end, before.answers | span.answers)
        else:
            joined.append(span)
    return joined


def _weights(found: list[set[int]], weights: list[float]) -> list[float]:
    """Returns the weight of each span, given the answers that each has words of.

    If each answer has one span, a span without words is of the answer of its number: an empty one.
    """
    if len(found) == len(weights) and all(answers <= {i} for i, answers in enumerate(found)):
        return weights
    of_spans = [{weights[i] for i in answers} for answers in found]
    for i, of_span in enumerate(of_spans):
        if len(of_span) != 1:
            raise ValueError(
                f"the chat template marks {len(found)} spans for {len(weights)} answers, and span {i + 1} has words of "
                f'{len(found[i]) or "none"} of them, so the answers that have a "weight" cannot be found; mark each answer '
                "by itself, or leave weights out"
            )
    return [of_span.pop() for of_span in of_spans]
