"""A conversation as tokens, with a mask of the assistant's tokens, or their weights.

A chat template may mark the assistant's text with `{% generation %}`. The marks then give the mask.
For other templates the spans are found by rendering parts of the conversation.
An answer starts where the earlier messages, rendered with the generation prompt, end. Where a template renders them
otherwise in the whole conversation, it starts after the last header of a turn before its content.
It ends with the text that the template puts after an answer: the end-of-turn token, tool calls.
"""

import re
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checkpoint.messages import as_template_wants, check_template, without_nulls
from moe_jax.train.data import reasoning
from moe_jax.train.data.chat_templates import keeping_template
from moe_jax.train.data.marks import GENERATION_TAG, Span, marked_spans, weights_of_answers
from moe_jax.train.data.reasoning import Message, Render
from moe_jax.train.data.turns import of_last_turn

_PROMPT_THINKS = re.compile(r"<think>\s*(</think>\s*)?$")
"""The end of a generation prompt that begins the model's reasoning, or skips it. Answers of the past may lack it."""


def chat_tokens(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list | None = None, *, empty_thinking: str = "learn"
) -> tuple[Int[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"] | Float[np.ndarray, "tokens"]]:
    """Returns (token ids, learned) of a conversation. The assistant's tokens are learned, with its end-of-turn tokens.

    An answer with "weight" 0 is not learned, as in OpenAI's format. If an answer has another weight than 0 and 1, `learned`
    holds the weight of each token, f32. With `empty_thinking` "mask" an empty think block that begins an answer is not learned.

    Raises:
      ValueError: the template cannot render the conversation, or would leave its tools or all reasoning out. Or answers cannot
        be told from the rest.
        Without marks: the first message is an answer, or an answer cannot be found in the whole. With marks:
        the template changes marked text, or it cannot be told which weight a span has.
    """
    template, messages, render = _prepared(tokenizer, messages, tools)
    check_template(template, messages, tools)
    reasoning.check_reasoning(template, messages, render)
    has_marks = bool(GENERATION_TAG.search(template))
    if has_marks:
        text, spans = marked_spans(template, messages, render)
    else:
        text = render(messages)
        spans = _found_spans(template, render, messages, text)
    if empty_thinking == "mask":
        spans = [span._replace(first=reasoning.after_empty_thinking(text, span.first, span.end)) for span in spans]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    # A token that reaches over a mark is learned, as in transformers; one that reaches over the end of a prompt is not.
    reached = ends - 1 if has_marks else starts
    mask = np.zeros(len(starts), np.float32 if has_weights(messages) else bool)
    if spans:
        firsts, span_ends, weights = (np.asarray(values) for values in zip(*spans, strict=True))
        # The last span that begins before a token's end: spans are in order, and none reaches into another.
        span = np.searchsorted(firsts, reached, side="right") - 1
        inside = (span >= 0) & (starts < span_ends[span])
        mask[inside] = weights[span[inside]]
    return np.asarray(encoded["input_ids"], np.int32), mask


def has_weights(messages: list[dict[str, Any]]) -> bool:
    """Tells if an answer of a conversation has another weight than 0 and 1."""
    return any(weight not in (0, 1) for weight in weights_of_answers(messages))


def answers_without_reasoning(tokenizer: Any, messages: list[dict[str, Any]], tools: list | None = None) -> list[int]:
    """Returns the numbers of the learned answers whose reasoning the chat template leaves out."""
    _, messages, render = _prepared(tokenizer, messages, tools)
    return reasoning.reasoning_left_out(messages, render)


def _prepared(tokenizer: Any, messages: list[Message], tools: list | None) -> tuple[str, list[Message], Render]:
    """Returns the chat template, the messages as it wants them, and the function that renders them with it."""
    template = tokenizer.get_chat_template(tools=tools)
    messages, tools = as_template_wants(tokenizer, list(map(without_nulls, messages)), tools)
    return template, messages, partial(_render, tokenizer, tools=tools)


def _found_spans(template: str, render: Render, messages: list[Message], text: str) -> list[Span]:
    """Returns the answers in `text` whose weight is not 0, for a template without marks."""
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "the conversation begins with the assistant's message, and an answer is found behind the messages before it; put a "
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
    return [i for i, message in enumerate(messages) if reasoning.is_learned(message)]


def _cause(render: Render, messages: list[Message]) -> str:
    """Names reasoning if answers are found without it, and --learned-answers last if that would find them."""

    def found(others: list[Message]) -> bool:
        text = render(others)
        return others != messages and all(_span(render, others, i, text) for i in _learned(others))

    cause = ", because of their reasoning" if found(reasoning.without_reasoning(messages)) else ""
    remedy = " --learned-answers last learns the last turn, which can be found; or" if found(of_last_turn(messages)) else ""
    return f"{cause}, so the assistant's tokens cannot be found;{remedy}"


def _span(render: Render, messages: list[Message], i: int, text: str) -> tuple[int, int] | None:
    """Returns (start, end) of answer i in `text`: from the end of the generation prompt through the end of the turn."""
    before = render(messages[:i], add_generation_prompt=True)
    others = _with_other_contents(render, messages, i)
    end = len(text) - _common_end(text, others)
    # Templates may render an answer differently when it comes last (Qwen3 adds an empty <think>), so what follows the
    # content is read off a rendering that ends with this answer, and looked for in the whole.
    up_to = messages[: i + 1]
    alone = render(up_to)
    turn_end = alone[len(alone) - _common_end(alone, _with_other_contents(render, up_to, i)) :]
    if not text.startswith(turn_end, end):
        # Without content, the line breaks of a think block that the whole lacks may be taken for those before tool calls.
        end, turn_end = len(text) - len(text[end:].lstrip()), turn_end.lstrip()
        if not turn_end or not text.startswith(turn_end, end):
            return None
    start: int | None = len(before)
    if not text.startswith(before):
        start = _after_header(before, render(messages[:i]), commonprefix([text, *others]))
    # Without content, what stands behind it may begin with characters of the generation prompt: Qwen3 writes a line break
    # before tool calls if there is content, and another one ends the prompt.
    if start is None or end + len(turn_end) < start:
        return None
    # The model stops at the end-of-turn token; the line break that templates put behind it is not the model's.
    return start, end + (len(turn_end.rstrip()) or len(turn_end))


def _after_header(prompted: str, plain: str, text: str) -> int | None:
    """Returns the start of an answer whose content begins at the end of `text`: the end of its turn's header.

    The generation prompt, which the messages before the answer have in `prompted` and not in `plain`, is the header. It may
    begin the reasoning. In `text` a think block may follow the header, and nothing else.
    """
    header = _PROMPT_THINKS.sub("", prompted.removeprefix(plain)) if prompted.startswith(plain) else ""
    start = text.rfind(header) + len(header)
    return start if header and header in text and reasoning.THINK_BLOCK.fullmatch(text, start) else None


def _with_other_contents(render: Render, messages: list[Message], i: int) -> list[str]:
    """Renders the messages with stand-ins for the content of message i.

    Their first and last characters differ: at most one of them can begin or end as the content does.
    """
    return [render([*messages[:i], {**messages[i], "content": other}, *messages[i + 1 :]]) for other in ("1x1", "2x2")]


def _common_end(text: str, others: list[str]) -> int:
    """Counts the characters that all texts end with."""
    return len(commonprefix([each[::-1] for each in (text, *others)]))


def _render(tokenizer, messages, tools, **options) -> str:
    """Renders the messages with the chat template, or with the one in `chat_template`."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # templates raise whatever they like, jinja's TemplateError mostly
        raise ValueError(f"the tokenizer's chat template refuses the first {len(messages)} messages: {error}") from error
