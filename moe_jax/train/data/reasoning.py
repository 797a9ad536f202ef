"""The reasoning before an answer, which a message has beside its content: written by the chat template, or left out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its reasoning; each template reads one of them."""


def check_reasoning(template: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Checks that a chat template reads the reasoning of a conversation's learned answers.

    Raises:
      ValueError: the template never mentions the key that they have it under: it would leave all of it out.
    """
    for key, _ in _reasonings(messages):
        if not re.search(rf"\b{key}\b", template):
            raise ValueError(
                f"the chat template would leave out {key}: it never mentions it; give another template, rename the key to the "
                "template's, or take it out of the data"
            )


def has_reasoning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Tells if a learned answer of a conversation has reasoning."""
    return any(_reasonings(messages))


def reasoning_left_out(text: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """Counts the learned answers whose reasoning does not stand in the rendered `text`.

    Qwen3's template, for one, writes the reasoning of the last turn alone.
    """
    return sum(reasoning.strip() not in text for _, reasoning in _reasonings(messages))


def _reasonings(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields key and text of the reasoning of each answer that is learned and has some."""
    for message in messages:
        if message["role"] == "assistant" and message.get("weight", 1):
            for key in KEYS:
                if isinstance(reasoning := message.get(key), str) and reasoning.strip():
                    yield key, reasoning
