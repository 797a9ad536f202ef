"""Arguments of tool calls: OpenAI writes a string of JSON, and many chat templates want the object."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_READS_OBJECT = re.compile(r"\barguments['\"\]]*\s*(\|\s*(tojson|items)|\.items\()")
"""`tojson` would write a string as JSON once more, and `items` refuses it."""
_TAKES_STRINGS = re.compile(r"\barguments['\"\]]*\s+is\s+(not\s+)?string")


def as_template_wants(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with arguments as objects, if the template reads them so and does not ask whether they are strings.

    Raises:
      ValueError: such a string is no JSON.
    """
    if not _READS_OBJECT.search(template) or _TAKES_STRINGS.search(template):
        return list(messages)
    return [
        {**message, "tool_calls": [_with_object(call, i) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for i, message in enumerate(messages)
    ]


def _with_object(call: Any, number: int) -> Any:
    """Returns a call, or its "function", with "arguments" that are no string."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"], number)}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError) as error:
        raise ValueError(f'message {number} calls a tool with "arguments" that are no JSON: {arguments!r:.80}') from error
