"""The reasoning of an answer, under a key of its message or within its content: written by the chat template, or left out."""

import re
from collections.abc import Callable
from typing import Any

from moe_jax.train.data.chat_templates import keeping_template

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its reasoning; each template reads one of them."""
EMPTY_THINKING = ("learn", "mask")
"""Choices for the empty think blocks that templates write into answers without reasoning."""
THINK_BLOCK = re.compile(r"\s*(?:(?:<think>.*)?</think>\s*)?", re.DOTALL)
"""Text between the header of a turn and its content: nothing, or a think block, whose <think> may be the prompt's."""
_EMPTY_BLOCK = re.compile(r"\s*(?:(<think>)\s*)?</think>\s*")
_IN_CONTENT = re.compile(r"(?:\s*<think>)?(.*)(?=</think>)", re.DOTALL)

Message = dict[str, Any]
Render = Callable[..., str]
"""Renders messages with the chat template."""


def check_reasoning(template: str, messages: list[Message], render: Render) -> None:
    """Checks that a chat template writes the reasoning that learned answers have under a key.

    Raises:
      ValueError: the template never mentions the key, or leaves reasoning out even of an answer that ends the conversation.
    """
    keys = [_keys(message) if is_learned(message) else [] for message in messages]
    for key in sum(keys, []):
        if not re.search(rf"\b{key}\b", template):
            raise ValueError(
                f"the chat template would leave out {key}: it never mentions it; give another template"
                f"{keeping_template(template)}, rename the key to the template's, or take it out of the data"
            )
    if keys[-1] and _is_left_out(messages, len(messages) - 1, render):
        raise ValueError(
            f"the chat template leaves out the reasoning ({keys[-1][0]}) even of the last answer, so none would ever be "
            f"learned; give a template that keeps it{keeping_template(template)}, or take it out of the data"
        )


def has_reasoning(messages: list[Message]) -> bool:
    """Tells if a learned answer of a conversation has reasoning."""
    return any(is_learned(message) and _changed(message, "") != message for message in messages)


def reasoning_left_out(messages: list[Message], render: Render) -> list[int]:
    """Returns the numbers of the learned answers whose reasoning is not in the rendered conversation.

    Qwen3's template, for one, writes the reasoning of the last turn alone.
    """
    return [i for i, message in enumerate(messages) if is_learned(message) and _is_left_out(messages, i, render)]


def without_reasoning(messages: list[Message]) -> list[Message]:
    """Returns the messages with empty reasoning."""
    return [_changed(message, "") if message["role"] == "assistant" else message for message in messages]


def after_empty_thinking(text: str, first: int, end: int) -> int:
    """Returns where an answer begins after the empty think block that it may start with; the prompt may have its <think>."""
    block = _EMPTY_BLOCK.match(text, first, end)
    if block and (block[1] or text[:first].rstrip().endswith("<think>")):
        return block.end()
    return first


def is_learned(message: Message) -> bool:
    """Tells if a message is an answer whose weight is not 0."""
    return message["role"] == "assistant" and bool(message.get("weight", 1))


def _keys(message: Message) -> list[str]:
    return [key for key in KEYS if isinstance(message.get(key), str) and message[key].strip()]


def _is_left_out(messages: list[Message], i: int, render: Render) -> bool:
    """Tells if message i has reasoning, and another reasoning would change nothing."""
    other = _changed(messages[i], "{}x")
    return other != messages[i] and render([*messages[:i], other, *messages[i + 1 :]]) == render(messages)


def _changed(message: Message, form: str) -> Message:
    """Returns a message whose reasoning is in another form, `{}` being the old one."""
    changed = {key: form.replace("{}", message[key]) for key in _keys(message)}
    content = message.get("content")
    if isinstance(content, str) and (found := _IN_CONTENT.match(content)) and found[1].strip():
        changed["content"] = content[: found.start(1)] + form.replace("{}", found[1]) + content[found.end(1) :]
    return message | changed
