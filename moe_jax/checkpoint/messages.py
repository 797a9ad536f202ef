"""The messages of a conversation, as training and chat take them."""

from collections.abc import Mapping, Sequence
from typing import Any

SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-60, 2.0**60
"""Weights of messages other than 0 lie between these: then f32 holds their products with losses, and sums of these."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> None:
    """Checks that each message of a conversation has a role and a text; an answer may call tools instead of a text.

    The "weight" of a message, if it has one, is a number of at least 0.

    Raises:
      ValueError: a message is wrong; the error names it and says why.
    """
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f'"messages" must be a list of {{"role": ..., "content": ...}}; got {messages!r:.80}')
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ValueError(f"message {i} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            raise ValueError(
                f'message {i} ({message["role"]}) has "content" in parts; join the texts of its parts into one string'
            )
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f'message {i} ({message["role"]}) needs a string "content"')
        check_unicode(f"message {i} ({message['role']})", content or "")
        if not _is_weight(message.get("weight", 1)):
            raise ValueError(
                f'message {i} ({message["role"]}) has "weight" {message["weight"]!r:.80}; it is 0, or a number from '
                f"{SMALLEST_WEIGHT:.1g} to {LARGEST_WEIGHT:.1g}"
            )


def check_unicode(name: str, text: str) -> None:
    """Checks that a tokenizer can read a text. Python makes halves of characters of bytes that are not UTF-8.

    Raises:
      ValueError: the text holds such a half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{ord(text[error.start]):#06x}"
        raise ValueError(f"{name} is not valid Unicode: character {error.start} is half of one, {half}; give UTF-8") from error


def check_template(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
    """Checks that a chat template writes the tools and the tool calls of a conversation.

    Raises:
      ValueError: there are tools, or calls of tools, that the template never mentions: it would leave them out.
    """
    needed = {"tools": bool(tools), "tool_calls": any(message.get("tool_calls") for message in messages)}
    if left_out := [name for name, there in needed.items() if there and name not in template]:
        raise ValueError(
            f"the chat template would leave out {' and '.join(left_out)}: it never mentions them; give another template"
        )


def _is_weight(value: Any) -> bool:
    """Tells if a value is a message's weight; a boolean is 0 or 1."""
    return isinstance(value, int | float) and (value == 0 or SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT)
