"""Reads messages in other programs' formats: ShareGPT's turns, contents in parts, and marks of learned answers."""

import json
from collections.abc import Mapping
from typing import Any

from moe_jax.checkpoint.messages import without_nulls

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its reasoning; each template reads one of them."""
EMPTY_THINKING = ("learn", "mask")
"""Choices for the empty think blocks that templates write into answers without reasoning."""
ROLE_OF = {
    **{name: "user" for name in ("human", "user")},
    **{name: "assistant" for name in ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call")},
    **{name: "tool" for name in ("tool", "observation", "function_response")},
    **{name: name for name in ("system", "developer")},
}
"""{a turn's "from": its role}."""
OF_MESSAGES = "messages."
"""Prefix of messages' keys in a list of rows' keys."""
_READ = {"role", "content", "weight", "tool_calls", "tool_call_id", "name", *KEYS}
"""Keys of messages that this library or most chat templates read."""


def as_message(turn: Any, number: int) -> dict[str, Any]:
    """Converts a ShareGPT turn {"from", "value"} to a message {"role", "content"}; messages pass through.

    The value of a "function_call" is the JSON of a call, or of a list of calls.

    Raises:
      ValueError: a turn has other keys, or an unknown "from".
    """
    if isinstance(turn, Mapping) and "role" in turn:
        return dict(turn)
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        raise ValueError(f'turn {number} must have the keys "from" and "value", or "role" and "content"; got {turn!r:.80}')
    if turn["from"] not in ROLE_OF:
        raise ValueError(f'turn {number} is "from" {turn["from"]!r}; known are {", ".join(ROLE_OF)}')
    further = {key: value for key, value in turn.items() if key not in ("from", "value")}
    message = {"role": ROLE_OF[turn["from"]], "content": turn["value"], **further}
    return message if turn["from"] != "function_call" else message | {"content": None, "tool_calls": _calls(turn, number)}


def plain_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Normalizes a message: content as one string, and a "weight" for its loss.

    Texts in parts are joined without a separator. Null keys other than "content" are dropped. Axolotl's "train": false and
    ms-swift's "loss": false override the weight with 0.

    Raises:
      ValueError: a part holds no text, or "train" or "loss" is neither true nor false.
    """
    made = without_nulls(message)
    if isinstance(made.get("content"), list):
        made["content"] = "".join(_text_of(part, number) for part in made["content"])
    marks = {key: made.pop(key) for key in ("train", "loss") if key in made}
    for key, mark in marks.items():
        if not isinstance(mark, bool):
            raise ValueError(f'message {number} has "{key}" {mark!r:.80}; it is true or false')
    if not marks:
        return made
    return {"weight": 1, **made} if all(marks.values()) else made | {"weight": 0}


def further_keys(messages: list[dict[str, Any]]) -> set[str]:
    """Returns "messages.KEY" for each message key that only some chat templates read."""
    return {OF_MESSAGES + key for message in messages for key in message.keys() - _READ}


def of_last_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with weight 0 for all answers before the last user message."""
    roles = [message["role"] for message in messages]
    last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else 0
    begin = max((i for i in range(last) if roles[i] == "user"), default=-1)
    return [
        message | {"weight": 0} if i < begin and message["role"] == "assistant" else message
        for i, message in enumerate(messages)
    ]


def _calls(turn: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    try:
        calls = json.loads(turn["value"]) if isinstance(turn["value"], str) else turn["value"]
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(
            f'turn {number} (function_call) must be JSON of {{"name": ..., "arguments": ...}}; got {turn["value"]!r:.80}'
        )
    return [{"type": "function", "function": dict(call)} for call in calls]


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f'message {number} has a part of "content" that is no text ({kind}); models here read text alone')
    return part["text"]
