"""Checks the messages of a conversation and converts them to the forms that a chat template reads."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-60, 2.0**60
"""Bounds of messages' nonzero weights: within them, products with losses and their sums do not overflow in f32."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> None:
    """Checks that each message of a conversation has a role and a text; an answer may call tools instead of a text.

    The optional "weight" of a message is a number of at least 0; None counts as absent.

    Raises:
      ValueError: a message is wrong; the error names it and gives the reason.
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
        check_unicode(content or "", f"message {i} ({message['role']})")
        if not _is_weight(1 if message.get("weight") is None else message["weight"]):
            raise ValueError(
                f'message {i} ({message["role"]}) has "weight" {message["weight"]!r:.80}; it is 0, or a number from '
                f"{SMALLEST_WEIGHT:.1g} to {LARGEST_WEIGHT:.1g}"
            )


def check_template(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
    """Checks that a chat template writes the tools and the tool calls of a conversation.

    Raises:
      ValueError: there are tools or tool calls that the template would leave out.
    """
    needed = {"tools": bool(tools), "tool_calls": any(message.get("tool_calls") for message in messages)}
    if left_out := [name for name, there in needed.items() if there and name not in template]:
        raise ValueError(
            f"the chat template would leave out {' and '.join(left_out)}: it never mentions them; give another template"
        )


def check_unicode(text: str, what: str) -> None:
    """Checks that a text has no unpaired surrogates, which JSON escapes and invalid UTF-8 can produce.

    Raises:
      ValueError: the text holds a half surrogate. The message names `what` and the surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{what} is not valid Unicode: it has half of a surrogate pair, {half}") from error


def without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without null keys other than "content", since `datasets` and API clients write such keys."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def as_template_wants(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list | None, **options: Any
) -> tuple[list[dict[str, Any]], list | None]:
    """Converts messages and tools to the forms that the tokenizer's chat template reads.

    Tools get OpenAI's form or keep their own, and arguments of calls are objects or strings. A developer's message becomes the
    system's if the template would leave it out. System messages next to each other are joined if the template would leave one
    out.

    Args:
      options: further values for the chat template.

    Raises:
      ValueError: arguments are not JSON, or the template would leave out a call, or a developer's or system's message.
    """
    template = tokenizer.get_chat_template(tools=tools)
    tools = whole_tools(tokenizer, template, tools)
    messages = with_readable_calls(tokenizer, template, messages)
    roles = {i: message["role"] for i, message in enumerate(messages) if message["role"] in ("developer", "system")}
    if len(roles) < 2 and "developer" not in roles.values():
        return messages, tools
    marks = {i: f"the {role}'s text {i}." for i, role in roles.items()}
    marked = [message | {"content": marks[i]} if i in marks else message for i, message in enumerate(messages)]
    is_rendered = False
    for form in (list, _as_system, _joined_system):
        try:
            text = tokenizer.apply_chat_template(form(marked), tools=tools, tokenize=False, **options)
        except Exception:  # of any kind, as the template or Jinja raises it
            continue
        is_rendered = True
        if all(mark in text for mark in marks.values()):
            return form(messages), tools
    if is_rendered:
        listed = ", ".join(f"{i} ({role})" for i, role in roles.items())
        raise ValueError(
            f"the chat template would leave out one of the messages {listed}; give one system message, at the beginning, or "
            "another template"
        )
    # The template refuses all forms. The caller renders the last one and reports the reason.
    return _as_system(messages), tools


def _as_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _joined_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with system and developer messages next to each other as one, an empty line between the texts."""
    made = []
    for role, alike in groupby(_as_system(messages), key=lambda message: message["role"]):
        run = list(alike)
        made += [run[0] | {"content": "\n\n".join(each["content"] for each in run)}] if role == "system" else run
    return made


def _is_weight(value: Any) -> bool:
    """Returns True if a value is a valid weight of a message; a boolean is 0 or 1."""
    return isinstance(value, int | float) and (value == 0 or SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT)


_ARGUMENTS = {"city": "Oslo"}
_CALLED = "forecast"
# Its name differs from the call's: else a template's list of tools would look like the call.
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "-", "parameters": {"type": "object"}},
}


def whole_tools(tokenizer: Any, template: str, tools: Sequence[Any] | None) -> list[Any] | None:
    """Returns the tools in OpenAI's form {"type": "function", "function": {...}}, wrapping bare functions.

    The latter stay as they are if the template reads names only in that form.
    """
    if tools is None:
        return None
    whole = [_whole(tool) for tool in tools]
    return list(tools) if whole != list(tools) and _reads_bare_tools(tokenizer, template) else whole


def with_readable_calls(tokenizer: Any, template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with tool calls in the form that the chat template reads.

    Arguments become objects, or strings of JSON if the template refuses objects or prints them as Python does. They stay as
    they are if the template renders both the same. A content of None becomes "", or the reverse, if the template writes calls
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
    chosen = next((other for other, form in forms.items() if form not in (None, "left out")), others[0])
    if (form := forms[chosen]) is None:
        return message
    if form == "left out":
        nearby = "its content" if content else "an empty content"
        raise ValueError(
            f"the chat template would leave out the tool_calls of message {number} next to {nearby}; give another template"
        )
    calls = [_with_arguments(call, form, number) for call in message["tool_calls"]]
    # The key is set even if None: some templates treat a message without it as having content.
    return {**message, "content": content or chosen, "tool_calls": calls}


@lru_cache(maxsize=64)
def _reads_bare_tools(tokenizer: Any, template: str) -> bool:
    """Returns True if the template renders the name of {"name": ...} but not of the same tool in OpenAI's form."""
    name, user = _TOOL["function"]["name"], [{"role": "user", "content": "?"}]
    bare, whole = (_text(tokenizer, template, user, [tool]) for tool in (_TOOL["function"], _TOOL))
    return name in bare and name not in whole


@lru_cache(maxsize=64)
def _form(tokenizer: Any, template: str, content: str | None) -> str | None:
    """Returns the form of arguments that the template reads with this content: "as is", "object" or "string".

    None if the template refuses a conversation with such a call, "left out" if it omits the call.
    """
    rendered = ""
    for tools in ([_TOOL], None):
        from_object, from_string = (
            _rendered(tokenizer, template, content, arguments, tools) for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS))
        )
        if "Oslo" in from_object and str(_ARGUMENTS) not in from_object:
            return "as is" if from_object == from_string else "object"
        if "Oslo" in from_string:
            return "string"
        rendered += from_object + from_string
    return None if not rendered else "as is" if _CALLED in rendered else "left out"


def _rendered(tokenizer: Any, template: str, content: str | None, arguments: Any, tools: list | None) -> str:
    """Returns a conversation with a tool call as the template renders it; "" if the template refuses it."""
    # Mistral's templates accept only ids of nine characters.
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


def _with_arguments(call: Any, form: str, number: int) -> Any:
    """Returns a call, or its "function", with its "arguments" in a form."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], form, number)}
    return {**call, "arguments": _in_form(call["arguments"], form, number)} if "arguments" in call else call


def _in_form(arguments: Any, form: str, number: int) -> Any:
    if form == "string":
        # The text that `tojson` writes in a chat template.
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping | list) else arguments
    if form == "as is" or not isinstance(arguments, str):
        return arguments
    try:
        # Some clients send "" for a call without arguments.
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f'message {number} calls a tool with "arguments" that are no JSON: {arguments!r:.80}') from error
