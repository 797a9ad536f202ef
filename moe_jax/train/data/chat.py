"""A conversation as tokens, with a mask of the assistant's tokens, or their weights.

A chat template may mark the assistant's text with `{% generation %}`. The marks then define the mask. For other templates the
spans are found by rendering parts of the conversation. Reasoning is under a key of an answer, or within its content; the
template writes it or leaves it out. An answer starts where the earlier messages, rendered with the generation prompt, end. If
the template renders those differently in the whole conversation, it starts after the last turn header before its content. It
ends with the text that the template puts after an answer: the end-of-turn token, tool calls.
"""

import re
from collections.abc import Callable
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checkpoint.messages import as_template_wants, check_template, without_nulls
from moe_jax.train.data.chat_templates import keeping_template
from moe_jax.train.data.marks import GENERATION_TAG, Span, marked_spans, weights_of_answers
from moe_jax.train.data.turns import KEYS, of_last_turn

_PROMPT_THINKS = re.compile(r"<think>\s*(</think>\s*)?$")
"""The end of a generation prompt that begins the model's reasoning, or skips it. Earlier answers may lack it."""
THINK_BLOCK = re.compile(r"\s*(?:(?:<think>.*)?</think>\s*)?", re.DOTALL)
"""Text between the header of a turn and its content: nothing, or a think block, whose <think> may belong to the prompt."""
_EMPTY_BLOCK = re.compile(r"\s*(?:(<think>)\s*)?</think>\s*")
_IN_CONTENT = re.compile(r"(?:\s*<think>)?(.*)(?=</think>)", re.DOTALL)

Message = dict[str, Any]
Render = Callable[..., str]
"""Renders messages with the chat template."""


def chat_tokens(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list | None = None, *, empty_thinking: str = "learn"
) -> tuple[Int[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"] | Float[np.ndarray, "tokens"]]:
    """Tokenizes a conversation; returns (token ids, learned), where assistant tokens and their end-of-turn tokens are learned.

    An answer with "weight" 0 is not learned, as in OpenAI's format. If an answer has a weight other than 0 and 1, `learned`
    holds the weight of each token, f32. With `empty_thinking` "mask" an empty think block that begins an answer is not learned.

    Raises:
      ValueError: the template cannot render the conversation, or would leave its tools or all reasoning out. Or answers cannot
        be located. Without marks: the first message is an answer, or an answer is not found in the whole text. With marks: the
        template changes marked text, or the weight of a span is ambiguous.
    """
    template, messages, render = _prepared(tokenizer, messages, tools)
    check_template(template, messages, tools)
    check_reasoning(template, messages, render)
    has_marks = bool(GENERATION_TAG.search(template))
    if has_marks:
        text, spans = marked_spans(template, messages, render)
    else:
        text = render(messages)
        spans = _found_spans(template, render, messages, text)
    if empty_thinking == "mask":
        spans = [span._replace(first=after_empty_thinking(text, span.first, span.end)) for span in spans]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    # A token that crosses a mark is learned, as in transformers; one that crosses the end of a prompt is not.
    reached = ends - 1 if has_marks else starts
    mask = np.zeros(len(starts), np.float32 if has_weights(messages) else bool)
    if spans:
        firsts, span_ends, weights = (np.asarray(values) for values in zip(*spans, strict=True))
        # The last span that begins before a token's end: spans are in order and do not overlap.
        span = np.searchsorted(firsts, reached, side="right") - 1
        inside = (span >= 0) & (starts < span_ends[span])
        mask[inside] = weights[span[inside]]
    return np.asarray(encoded["input_ids"], np.int32), mask


def has_weights(messages: list[dict[str, Any]]) -> bool:
    """Returns True if an answer of a conversation has a weight other than 0 and 1."""
    return any(weight not in (0, 1) for weight in weights_of_answers(messages))


def answers_without_reasoning(tokenizer: Any, messages: list[dict[str, Any]], tools: list | None = None) -> list[int]:
    """Returns the indices of learned answers whose reasoning the chat template omits.

    For example, Qwen3's template writes only the reasoning of the last turn.
    """
    _, messages, render = _prepared(tokenizer, messages, tools)
    return [i for i in _learned(messages) if _is_left_out(messages, i, render)]


def _prepared(tokenizer: Any, messages: list[Message], tools: list | None) -> tuple[str, list[Message], Render]:
    """Returns the chat template, the messages in its form, and the function that renders them."""
    template = tokenizer.get_chat_template(tools=tools)
    messages, tools = as_template_wants(tokenizer, list(map(without_nulls, messages)), tools)
    return template, messages, partial(_render, tokenizer, tools=tools)


def _found_spans(template: str, render: Render, messages: list[Message], text: str) -> list[Span]:
    """Returns the answers in `text` whose weight is not 0, for a template without marks."""
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "the conversation begins with the assistant's message, and answers are found by what precedes them; put a "
            "system or user message first, or use a template that marks answers with {% generation %} ... {% endgeneration %}"
        )
    spans = list[Span]()
    for i in _learned(messages):
        if (span := _span(render, messages, i, text)) is None:
            raise ValueError(
                f"the tokenizer's chat template renders the messages before answer {i} differently by themselves than in the "
                f"whole conversation{_cause(render, messages)} use a template that marks them with "
                "{% generation %} ... {% endgeneration %}" + keeping_template(template)
            )
        spans.append(Span(*span, messages[i].get("weight", 1)))
    return spans


def _learned(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if is_learned(message)]


def _cause(render: Render, messages: list[Message]) -> str:
    """Explains why answers are not found: suggests reasoning as the cause, or --learned-answers last as the remedy."""

    def found(others: list[Message]) -> bool:
        text = render(others)
        return others != messages and all(_span(render, others, i, text) for i in _learned(others))

    cause = ", because of their reasoning" if found(without_reasoning(messages)) else ""
    remedy = " --learned-answers last learns the last turn, which can be found; or" if found(of_last_turn(messages)) else ""
    return f"{cause}, so the assistant's tokens cannot be found;{remedy}"


def _span(render: Render, messages: list[Message], i: int, text: str) -> tuple[int, int] | None:
    """Returns (start, end) of answer i in `text`: from the end of the generation prompt through the end of the turn."""
    before = render(messages[:i], add_generation_prompt=True)
    others = _with_other_contents(render, messages, i)
    end = len(text) - _common_end(text, others)
    # Templates may render an answer differently when it comes last (Qwen3 adds an empty <think>), so the text after the content
    # is taken from a rendering that ends with this answer, and searched for in the whole.
    up_to = messages[: i + 1]
    alone = render(up_to)
    turn_end = alone[len(alone) - _common_end(alone, _with_other_contents(render, up_to, i)) :]
    if not text.startswith(turn_end, end):
        # Without content, line breaks of a think block missing in the whole could be mistaken for those before tool calls.
        end, turn_end = len(text) - len(text[end:].lstrip()), turn_end.lstrip()
        if not turn_end or not text.startswith(turn_end, end):
            return None
    start: int | None = len(before)
    if not text.startswith(before):
        start = _after_header(before, render(messages[:i]), commonprefix([text, *others]))
    # Without content, the text after it may begin with characters of the generation prompt: Qwen3 writes a line break before
    # tool calls if there is content, and another one ends the prompt.
    if start is None or end + len(turn_end) < start:
        return None
    # The model stops at the end-of-turn token; the line break that templates add after it is not the model's.
    return start, end + (len(turn_end.rstrip()) or len(turn_end))


def _after_header(prompted: str, plain: str, text: str) -> int | None:
    """Returns where an answer starts in `text`: at the end of its turn's header. None if that is not clear.

    `prompted` and `plain` are the earlier messages with and without the generation prompt, which is the header and may begin
    the reasoning. `text` ends where the answer's content begins. Only a think block may follow the header in it.
    """
    header = _PROMPT_THINKS.sub("", prompted.removeprefix(plain)) if prompted.startswith(plain) else ""
    start = text.rfind(header) + len(header)
    return start if header and header in text and THINK_BLOCK.fullmatch(text, start) else None


def _with_other_contents(render: Render, messages: list[Message], i: int) -> list[str]:
    """Renders the messages with placeholders for the content of message i.

    Their first and last characters differ: at most one placeholder can begin or end like the content.
    """
    return [render([*messages[:i], {**messages[i], "content": other}, *messages[i + 1 :]]) for other in ("1x1", "2x2")]


def _common_end(text: str, others: list[str]) -> int:
    """Returns the length of the common suffix of all texts."""
    return len(commonprefix([each[::-1] for each in (text, *others)]))


def _render(tokenizer, messages, tools, **options) -> str:
    """Renders the messages with the chat template, or with the one in `chat_template`."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # templates raise arbitrary errors, mostly jinja's TemplateError
        raise ValueError(f"the tokenizer's chat template refuses the first {len(messages)} messages: {error}") from error


def check_reasoning(template: str, messages: list[Message], render: Render) -> None:
    """Checks that a chat template renders reasoning that learned answers have in a separate key.

    Raises:
      ValueError: the template never mentions the key, or omits reasoning even in an answer that ends the conversation.
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
    """Returns True if a learned answer of a conversation has reasoning."""
    return any(is_learned(message) and _changed(message, "") != message for message in messages)


def without_reasoning(messages: list[Message]) -> list[Message]:
    """Returns the messages with empty reasoning."""
    return [_changed(message, "") if message["role"] == "assistant" else message for message in messages]


def after_empty_thinking(text: str, first: int, end: int) -> int:
    """Returns the start of an answer after an empty <think> block, if it has one; <think> may be in the prompt."""
    block = _EMPTY_BLOCK.match(text, first, end)
    if block and (block[1] or text[:first].rstrip().endswith("<think>")):
        return block.end()
    return first


def is_learned(message: Message) -> bool:
    """Returns True if a message is an answer with a nonzero weight."""
    return message["role"] == "assistant" and bool(message.get("weight", 1))


def _keys(message: Message) -> list[str]:
    return [key for key in KEYS if isinstance(message.get(key), str) and message[key].strip()]


def _is_left_out(messages: list[Message], i: int, render: Render) -> bool:
    """Returns True if message i has reasoning that the template ignores."""
    other = _changed(messages[i], "{}x")
    return other != messages[i] and render([*messages[:i], other, *messages[i + 1 :]]) == render(messages)


def _changed(message: Message, form: str) -> Message:
    """Returns a message with its reasoning in another form, in which `{}` is the old text."""
    changed = {key: form.replace("{}", message[key]) for key in _keys(message)}
    content = message.get("content")
    if isinstance(content, str) and (found := _IN_CONTENT.match(content)) and found[1].strip():
        changed["content"] = content[: found.start(1)] + form.replace("{}", found[1]) + content[found.end(1) :]
    return message | changed
