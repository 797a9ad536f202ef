"""The messages of a conversation, as training and chat take them."""

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> None:
    """Checks that each message of a conversation has a role and a text; an answer may call tools instead of a text.

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
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f'message {i} ({message["role"]}) has "weight" {message["weight"]!r}; it is 0 or 1')


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
