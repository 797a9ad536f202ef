"""Prepares an answer in a chat: the tokens of its prompt, the grammar of its text, and how its parts are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from moe_jax.generation.text import chat_prompts
from moe_jax.generation.tool_calls import (
    END_OF_THOUGHT,
    FORMATS,
    THINK,
    AnswerPart,
    AnswerParts,
    CallFormat,
    HarmonyParts,
    format_of,
    schemas_of,
)
from moe_jax.serving.grammar import Grammars, answer_grammar, calls_grammar, is_installed
from moe_jax.serving.request import Completion, SamplingOptions


class FieldError(ValueError):
    """A wrong field of a request."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, and the answer that is wanted."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    """auto, none, required, or {"type": "function", "function": {"name": ...}}."""
    one_call: bool = False
    """True: a forced answer has a single call."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the chat template."""
    effort: str | None = None
    """How much the model should think: passed to a template that reads `reasoning_effort` or `enable_thinking`."""
    continues: bool = False
    """True: the last message is the beginning of the answer."""
    grammar: str | None = None
    """The grammar of the answer's text."""


class Prepared(NamedTuple):
    """An answer that can be submitted to an engine."""

    tokens: list[int]
    grammar: str | None
    reader: Callable[[], AnswerParts]
    forced: str
    """The beginning of the answer, which the prompt includes."""
    shows_special: bool
    """True if special tokens mark a thought or a call."""

    def options(self, options: SamplingOptions) -> SamplingOptions:
        """Returns a request's options with the answer's grammar, and with special tokens that mark its parts."""
        skips = options.skip_special_tokens and not self.shows_special
        return replace(options, skip_special_tokens=skips, grammar=self.grammar)

    def parts(self) -> AnswerParts:
        """Returns a reader of the answer."""
        parts = self.reader()
        parts.add(self.forced)
        return parts


class Reply(NamedTuple):
    """An answer in a chat."""

    text: str
    reasoning: str
    calls: list[dict[str, Any]]
    """{"name": ..., "arguments": {...}} of each call."""
    completion: Completion


def reply_of(completion: Completion, parts: AnswerParts) -> Reply:
    """Returns a completion as an answer in a chat."""
    found = parts.add(completion.text or "", ends=True)
    calls = [{"name": part.call.name, "arguments": part.call.arguments} for part in found if part.call is not None]
    return Reply(joined(found, "content"), joined(found, "reasoning"), calls, completion)


def joined(parts: Sequence[AnswerPart], kind: str) -> str:
    """Returns the text of all parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def prepare(
    tokenizer: Any, request: ChatRequest, grammars: Callable[[], Grammars], check: Callable[[str], None] | None = None
) -> Prepared:
    """Prepares an answer.

    An answer that must call a tool follows a grammar, after its thought. Without llguidance, and for gpt-oss, its beginning is
    forced, and it has no thought.

    Args:
      grammars: the engine's compiled grammars; called if there is a grammar.
      check: as in `chat_prompts`.

    Raises:
      FieldError, ValueError: the conversation, its tools or the template's values are wrong, or a grammar is.
    """
    tools = list(request.tools) if request.tool_choice != "none" else []
    template = tokenizer.get_chat_template(tools=tools or None) if tokenizer.chat_template else ""
    in_channels = format_of(template) == "harmony"
    if in_channels and request.grammar is not None:
        raise ValueError("a grammar constrains a whole answer, and this model's answers have channels: leave the grammar out")
    name = format_of(template) if tools else None
    calls = FORMATS[name] if name else None
    names = _forced_names(request, calls)
    forced = ""
    if calls is not None and names and (in_channels or not is_installed()):
        forced = calls.begin + (calls.any_tool if request.tool_choice == "required" else calls.before(names[0]))
    if request.continues and names:
        raise FieldError("tool_choice", "an answer that the client begins has no tool_choice")
    values = dict(request.values) | _effort(request.effort, template)
    (tokens,) = chat_prompts(tokenizer, [request.messages], tools or None, values, check, continues=request.continues)
    if unread := [name for name in values if name not in template]:
        raise ValueError(f"template_options: the model's chat template never mentions {', '.join(unread):.200}")
    end = request.messages[-1]["content"] if request.continues else tokenizer.decode(tokens[-8:])
    thinks = end.rfind(THINK) > end.rfind(END_OF_THOUGHT) if END_OF_THOUGHT in template else None
    if forced:
        # A thought that the template begins would hide the call.
        forced_tokens = (END_OF_THOUGHT + "\n\n" if end.rstrip().endswith(THINK) else "") + forced
        tokens += tokenizer(forced_tokens, add_special_tokens=False)["input_ids"]
        thinks = None if thinks is None else False
    schemas, texts = schemas_of(tools), [] if request.grammar is None else [request.grammar]
    if request.grammar is not None:
        # Compiled alone first, so that an error names its own place.
        grammars().compiled(request.grammar)
    if texts and calls or names and not forced:
        assert calls is not None
        wanted = {each: schemas[each] for each in names or schemas}
        texts = [*([] if names else texts), calls_grammar(tokenizer, calls, wanted, one=request.one_call)]
    grammar = None
    if texts:
        is_over = thinks is False and END_OF_THOUGHT in end
        grammar = answer_grammar(tokenizer, texts, None if is_over else thinks)
        grammars().compiled(grammar)
    markers = {THINK, *([calls.begin] if calls else [])}
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    reader: Callable[[], AnswerParts] = partial(AnswerParts, thinks, calls, schemas)
    if in_channels:
        reader = partial(HarmonyParts, calls, schemas, in_text=request.continues)
    return Prepared(tokens, grammar, reader, forced, in_channels or bool(markers & special))


def _forced_names(request: ChatRequest, calls: CallFormat | None) -> list[str]:
    """Returns the names of the tools that a forced call may have; empty if no call is forced.

    Raises:
      FieldError: the choice is malformed, its tool is not among the tools, or the model's format of calls is unknown.
    """
    choice, known = request.tool_choice, [*schemas_of(request.tools)]
    if choice in ("auto", "none"):
        return []
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    wanted = named.get("name") if isinstance(named, Mapping) else None
    if choice != "required" and not isinstance(wanted, str):
        raise FieldError(
            "tool_choice", 'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}'
        )
    if not known or wanted is not None and wanted not in known:
        raise FieldError("tool_choice", f"tool_choice must name one of the tools {known!r:.200}")
    if calls is None:
        raise FieldError("tool_choice", "tool_choice must be auto or none: the model's format of calls is unknown")
    return known if wanted is None else [wanted]


def _effort(effort: str | None, template: str) -> dict[str, Any]:
    """Returns the chat template's option for an effort: the effort itself, or whether the model thinks.

    Raises:
      FieldError: the template has neither.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" not in template:
        raise FieldError("reasoning_effort", "reasoning_effort: the model's chat template has no such option")
    return {"enable_thinking": effort not in ("none", "minimal")}
