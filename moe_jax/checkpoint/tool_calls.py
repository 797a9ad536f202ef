"""Tools and their calls in the forms that a chat template reads: clients and data have several."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_ARGUMENTS = {"city": "Oslo"}
_CALLED = "forecast"
# Its name differs from the call's, which must not be found in the list of tools.
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "-", "parameters": {"type": "object"}},
}


def whole_tools(tokenizer: Any, template: str, tools: Sequence[Any] | None) -> list[Any] | None:
    """Returns the tools as {"type": "function", "function": {"name": ...}}, also those given as {"name": ...}.

    These stay as they are if the template reads their names only there.
    """
    if tools is None:
        return None
    whole = [_whole(tool) for tool in tools]
    return list(tools) if whole != list(tools) and _reads_bare_tools(tokenizer, template) else whole


def with_readable_calls(tokenizer: Any, template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with tool calls as the template reads them.

    Arguments become objects, or strings of JSON if the template refuses objects or prints them as Python does. They stay as
    they are if the template writes both alike. A content of None becomes "", or the reverse, if the template writes calls
    with only one of them.

    Raises:
      ValueError: the template would leave a call out, or reads objects and a string is no JSON.
    """
    return [
        _readable(tokenizer, template, message, i) if message.get("tool_calls") and "tool_calls" in template else message
        for i, message in enumerate(messages)
    ]


def _whole(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else ""
    if kind not in (None, "function") or (kind and "function" in tool):
        return tool
    untyped = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", **(untyped if "function" in tool else {"function": untyped})}


def _readable(tokenizer: Any, template: str, message: dict[str, Any], number: int) -> dict[str, Any]:
    if not isinstance(message["tool_calls"], list):
        return message
    content = message.get("content")
    others = ["-"] if content else ["", None] if content == "" else [None, ""]
    forms = {other: _form(tokenizer, template, other) for other in others}
    chosen = next((other for other, form in forms.items() if form not in (None, _left_out)), others[0])
    if (form := forms[chosen]) is None:
        return message
    if form is _left_out:
        nearby = "its content" if content else "an empty content"
        raise ValueError(
            f"the chat template would leave out the tool_calls of message {number} next to {nearby}; give another template"
        )
    calls = [_with_arguments(call, form, number) for call in message["tool_calls"]]
    # Also None: to templates that ask for it, a message without the key has a content.
    return {**message, "content": content or chosen, "tool_calls": calls}


@lru_cache(maxsize=64)
def _reads_bare_tools(tokenizer: Any, template: str) -> bool:
    """Tells if the template writes the name of {"name": ...} and not of the same tool in OpenAI's form."""
    name, user = _TOOL["function"]["name"], [{"role": "user", "content": "?"}]
    bare, whole = (_text(tokenizer, template, user, [tool]) for tool in (_TOOL["function"], _TOOL))
    return name in bare and name not in whole


@lru_cache(maxsize=64)
def _form(tokenizer: Any, template: str, content: str | None) -> Callable[[Any, int], Any] | None:
    """Returns the function that brings arguments into the form that the template reads next to a content.

    None if the template refuses a conversation with such a call, `_left_out` if it writes nothing of the call.
    """
    rendered = ""
    for tools in ([_TOOL], None):
        from_object, from_string = (
            _rendered(tokenizer, template, content, arguments, tools) for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS))
        )
        if "Oslo" in from_object and str(_ARGUMENTS) not in from_object:
            return _as_is if from_object == from_string else _as_object
        if "Oslo" in from_string:
            return _as_string
        rendered += from_object + from_string
    return None if not rendered else _as_is if _CALLED in rendered else _left_out


def _rendered(tokenizer: Any, template: str, content: str | None, arguments: Any, tools: list | None) -> str:
    """Returns a conversation with a tool call as the template renders it; "" if the template refuses it."""
    # Mistral's templates accept ids of nine characters alone.
    call = {"id": "call00001", "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "-", "name": _CALLED, "tool_call_id": "call00001"},
    ]
    return _text(tokenizer, template, messages, tools)


def _text(tokenizer: Any, template: str, messages: list[dict[str, Any]], tools: list | None) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    except Exception:  # of any kind, as the template or Jinja raises it
        return ""


def _with_arguments(call: Any, form: Callable[[Any, int], Any], number: int) -> Any:
    """Returns a call, or its "function", with its "arguments" in a form."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], form, number)}
    return {**call, "arguments": form(call["arguments"], number)} if "arguments" in call else call


def _as_is(arguments: Any, number: int) -> Any:
    return arguments


def _as_object(arguments: Any, number: int) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        # Some clients send "" for a call without arguments.
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f'message {number} calls a tool with "arguments" that are no JSON: {arguments!r:.80}') from error


def _as_string(arguments: Any, number: int) -> Any:
    # The text that `tojson` writes in a chat template.
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping | list) else arguments


def _left_out(arguments: Any, number: int) -> Any:
    raise AssertionError("marks templates that write nothing of a call; never called")
