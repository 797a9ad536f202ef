"""Splits a model's answer into its thought, its text and its tool calls, while the answer arrives in pieces.

The result does not depend on where one piece ends. A call that cannot be read stays text.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Call(NamedTuple):
    """A tool call; `id` only if the model writes one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class CallFormat(NamedTuple):
    """A model's way of writing tool calls: a block from `begin` to `end`."""

    begin: str
    end: str
    read: Callable[[str, Mapping[str, Any]], list[Call]]
    """Returns the calls of the text between `begin` and `end`, by the schemas of the tools' parameters (`schemas_of`).

    Raises one of `UNREADABLE` if the text is not well-formed.
    """
    forced: str
    """The text after `begin` that makes the model call the tool {name}."""
    after: str
    """The text after the arguments, before `end`."""
    parameter: tuple[str, str] | None = None
    """The texts around the value of the parameter {key}; None: arguments are JSON."""
    any_tool: str = ""
    """The text after `begin` that makes the model call a tool of its choice."""

    def before(self, name: str) -> str:
        """Returns the text between `begin` and the arguments of a call of a tool."""
        return self.forced.format(name=json.dumps(name) if "{{" in self.forced else name)


UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors of `CallFormat.read`."""


def _hermes(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    call = _read_json(block)
    return [_checked(call["name"], call.get("arguments") or {})]


def _qwen3_coder(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    name, body = _matched(r"\s*<function=([^>\n]+)>(.*)</function>\s*", block)
    return [_checked(name, _typed(_listed(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body), schemas.get(name)))]


def _glm(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    name, body = _matched(r"\s*([\w.-]+)\s*((?:<arg_key>.*</arg_value>)?)\s*", block)
    pairs = _listed(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body)
    return [_checked(name, _typed(pairs, schemas.get(name)))]


def _deepseek(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    calls = []
    for text in _listed(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", block):
        name, _, rest = text.partition("<｜tool▁sep｜>")
        if "```json" in rest:  # V3 writes "function" first, and V3.1 the name.
            name, rest = _matched(r"([^\n]+)\n```json\n(.*)\n```\s*", rest)
        calls.append(_checked(name.strip(), _read_json(rest)))
    return calls


def _kimi_k2(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    calls = []
    for text in _listed(r"<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>", block):
        written, arguments = _matched(r"\s*(\S+)\s*<\|tool_call_argument_begin\|>(.*)", text)
        (name,) = _matched(r"(?:functions\.)?(.+?)(?::\d+)?", written)
        calls.append(_checked(name, _read_json(arguments), written))
    return calls


def _harmony(block: str, schemas: Mapping[str, Any]) -> list[Call]:
    # A preamble may precede the call's own message.
    (name, arguments) = _matched(r".*\bto=functions\.([\w.-]+)[^{]*<\|message\|>(.*)", block)
    return [_checked(name, _read_json(arguments))]


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek
FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", _hermes, '\n{{"name": {name}, "arguments":', "}\n"),
    "qwen3_coder": CallFormat(
        "<tool_call>", "</tool_call>", _qwen3_coder, "\n<function={name}>\n", "</function>\n",
        ("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "glm": CallFormat(
        "<tool_call>", "</tool_call>", _glm, "{name}\n", "", ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "deepseek_v3": CallFormat(
        *_DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v3.1": CallFormat(*_DEEPSEEK, "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi_k2,
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "harmony": CallFormat(
        "<|channel|>commentary", "<|call|>", _harmony, " to=functions.{name} <|constrain|>json<|message|>", "",
        any_tool=" to=functions.",
    ),
}  # fmt: skip
_SIGNS = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "```json": "deepseek_v3",
    "<｜tool▁calls▁begin｜>": "deepseek_v3.1",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "<tool_call>": "hermes",
    "<|channel|>analysis<|message|>": "harmony",
}
"""A text that only the chat template of a format contains, after the formats above it."""


def format_of(template: str) -> str | None:
    """Returns the name of the format in which a chat template writes tool calls; None if it is not in the table."""
    return next((name for sign, name in _SIGNS.items() if sign in template and FORMATS[name].begin in template), None)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schemas of the parameters of tools, by the tools' names."""
    found = [tool.get("function", tool) for tool in tools]
    named = [each for each in found if isinstance(each, Mapping) and isinstance(each.get("name"), str)]
    return {each["name"]: each.get("parameters") or {} for each in named}


def calls_in(text: str, calls: CallFormat, schemas: Mapping[str, Any]) -> list[Call | Exception]:
    """Returns the calls of a whole answer, and for each block that is not well-formed its error."""
    found: list[Call | Exception] = []
    for block in re.findall(f"{re.escape(calls.begin)}(.*?){re.escape(calls.end)}", text, re.S):
        try:
            found += calls.read(block, schemas)
        except UNREADABLE as error:
            found.append(error)
    return found


def _checked(name: Any, arguments: Any, id: str | None = None) -> Call:
    arguments = _read_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"a call has a name and an object of arguments; got {name!r:.40} and {arguments!r:.40}")
    return Call(name, arguments, id)


def _read_json(text: str) -> Any:
    """Returns the value of a JSON text, with numbers and strings that JSON can hold again.

    Raises:
      ValueError: the text is not JSON.
    """
    found = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
    # An answer with half of a surrogate pair could not be encoded.
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace")) if "\\u" in text else found


def _finite(text: str) -> float:
    """Returns the nearest finite number: 1e999 is JSON, but Python would write it as Infinity, which is not."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _matched(pattern: str, text: str) -> tuple[str, ...]:
    if (found := re.fullmatch(pattern, text, re.S)) is None:
        raise ValueError(f"the call {text!r:.80} is not well-formed")
    return found.groups()


def _listed(pattern: str, text: str) -> list[Any]:
    """Returns all matches of a pattern; the text may contain nothing else but space."""
    if re.sub(pattern, "", text, flags=re.S).strip():
        raise ValueError(f"the calls {text!r:.80} are not well-formed")
    return re.findall(pattern, text, re.S)


def _typed(pairs: Sequence[tuple[str, str]], schema: Any) -> dict[str, Any]:
    """Returns arguments that were written as text, with values of the types in the tool's schema."""
    properties = (schema or {}).get("properties", {})
    return {name: _value(text, properties.get(name, {"type": "string"})) for name, text in pairs}


def _value(text: str, schema: Any) -> Any:
    kinds = schema.get("type")
    if kinds == "string" or isinstance(kinds, list) and "string" in kinds and text != "null":
        return text
    try:
        return _read_json(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer: text of a kind, or a tool call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


THINK, END_OF_THOUGHT = "<think>", "</think>"


class AnswerParts:
    """The parts of an answer. Space before and after a thought, and before a call, is dropped. A thought
    counts only at the start of the answer: later text may mention the marker.

    Args:
      thinks: None leaves thoughts in the text; True: the answer begins inside a thought; False: it does not.
      calls: the format of calls; None leaves them in the text.
      schemas: the schemas of the tools' parameters (`schemas_of`).
    """

    def __init__(self, thinks: bool | None, calls: CallFormat | None, schemas: Mapping[str, Any] | None = None):
        self.reasoning = bool(thinks)
        self.splits_thoughts, self._calls, self._schemas = thinks is not None, calls, schemas or {}
        self._space, self._drops_space, self._held, self._in_call = "", self.reasoning, "", False
        self._at_start = bool(self.splits_thoughts)

    def add(self, text: str, *, ends: bool = False) -> list[AnswerPart]:
        """Returns the parts that a piece of text completes; `ends`: the answer ends with it."""
        found: list[AnswerPart] = []
        for before, marker in self._cut(text):
            found += self._block(before, marker) if self._in_call else self._text(before)
            self._turn(marker)
        if self._in_call:
            if ends and self._calls:
                # Cut off: the incomplete text could be read as a call of another tool.
                found.append(AnswerPart("content", self._space + self._calls.begin + self._held))
                self._held, self._space = "", ""
        else:
            keep = 0 if ends else self._num_held()
            cut = len(self._held) - keep
            found += self._text(self._held[:cut])
            self._held = self._held[cut:]
        if ends and self._space and not self.reasoning:
            found.append(AnswerPart("content", self._space))
        return found

    def _cut(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields the text before each marker, and the marker; `_markers` may differ after each. Holds the rest."""
        self._held += text
        while (place := self._next_marker()) is not None:
            start, marker = place
            before, self._held = self._held[:start], self._held[start + len(marker) :]
            yield before, marker

    def _markers(self) -> list[str]:
        if self._in_call and self._calls:
            return [self._calls.end]
        if self.reasoning:
            return [END_OF_THOUGHT]
        return ([THINK] if self._at_start else []) + ([self._calls.begin] if self._calls else [])

    def _next_marker(self) -> tuple[int, str] | None:
        places = ((start, each) for each in self._markers() if (start := self._held.find(each)) >= 0)
        return min(((start, each) for start, each in places if each != THINK or not self._held[:start].strip()), default=None)

    def _num_held(self) -> int:
        """Returns the length of the longest suffix of the text that is a prefix of a marker."""
        longest = min(len(self._held), max(map(len, self._markers()), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(m.startswith(self._held[-n:]) for m in self._markers())), 0)

    def _turn(self, marker: str) -> None:
        """Enters or leaves a thought or a call."""
        if marker in (THINK, END_OF_THOUGHT):
            self.reasoning = marker == THINK
            self._space, self._drops_space, self._at_start = "", True, False
        else:
            self._in_call, self._at_start = not self._in_call, False

    def _text(self, text: str) -> list[AnswerPart]:
        """Returns text as a part; holds back space at its end, which only text may follow."""
        text = self._space + text
        text = text.lstrip() if self._drops_space else text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._drops_space &= not shown
        self._at_start &= not shown
        return [AnswerPart("reasoning" if self.reasoning else "content", shown)] if shown else []

    def _block(self, block: str, end: str) -> list[AnswerPart]:
        assert self._calls is not None
        try:
            calls = self._calls.read(block, self._schemas)
            if not calls:
                raise ValueError("a block without calls")
        except UNREADABLE:
            space, self._space = self._space, ""
            return [AnswerPart("content", space + self._calls.begin + block + end)]
        self._space = ""
        return [AnswerPart("call", call=call) for call in calls]


class HarmonyParts(AnswerParts):
    """The parts of an answer of gpt-oss, which consists of messages (https://cookbook.openai.com/articles/openai-harmony).

    `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant` and so on: messages of the channel analysis are thoughts, those to
    functions are calls, and all others are text.

    Args:
      in_text: the answer begins inside a message of text, not before the name of a channel.
    """

    def __init__(self, calls: CallFormat | None, schemas: Mapping[str, Any] | None = None, *, in_text: bool = False):
        super().__init__(False, calls, schemas)
        self._header, self._in_header = "", not in_text

    def add(self, text: str, *, ends: bool = False) -> list[AnswerPart]:
        """Returns the parts that a piece of text completes; `ends`: the answer ends with it."""
        found: list[AnswerPart] = []
        for before, _ in self._cut(text):
            found += [] if self._in_header else self._message(before)
            self._turn(before if self._in_header else "")
        if ends or not (self._in_header or self._in_call):
            cut = len(self._held) - (0 if ends else self._num_held())
            found += [] if self._in_header else self._message(self._held[:cut])
            self._held = self._held[cut:]
        return found

    def _markers(self) -> list[str]:
        return ["<|message|>"] if self._in_header else ["<|end|>", "<|call|>", "<|return|>", "<|start|>"]

    def _turn(self, header: str) -> None:
        """Enters a message after its header, or leaves it."""
        self._header, self._in_header = header, not self._in_header
        self.reasoning = not self._in_header and "<|channel|>analysis" in header
        self._in_call = not self._in_header and self._calls is not None and "to=functions." in header

    def _message(self, text: str) -> list[AnswerPart]:
        """Returns a piece of a message's text, or a whole call; the header of a call that cannot be read is text too."""
        if not self._in_call or self._calls is None:
            return [AnswerPart("reasoning" if self.reasoning else "content", text)] if text else []
        whole = f"{self._header}<|message|>{text}"
        try:
            return [AnswerPart("call", call=call) for call in self._calls.read(whole, self._schemas)]
        except UNREADABLE:
            return [AnswerPart("content", whole)]
