"""A conversation as tokens, with a mask of the assistant's tokens, or their weights.

A chat template may mark the assistant's text with `{% generation %}`. The marks then give the mask.
For other templates the spans are found by rendering parts of the conversation.
An answer starts where the earlier messages, rendered with the generation prompt, end.
It ends with the text that the template puts after an answer: the end-of-turn token, tool calls.
"""

from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checkpoint.messages import as_template_wants, check_template
from moe_jax.train.data.marks import GENERATION_TAG, Span, marked_spans, weights_of_answers
from moe_jax.train.data.reasoning import check_reasoning


def chat_tokens(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list | None = None
) -> tuple[Int[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"] | Float[np.ndarray, "tokens"]]:
    """Returns (token ids, learned) of a conversation. The assistant's tokens are learned, with its end-of-turn tokens.

    An answer with "weight" 0 is not learned, as in OpenAI's format. If an answer has another weight than 0 and 1, `learned`
    holds the weight of each token, f32.

    Raises:
      ValueError: the template cannot render the conversation, or would leave its tools or all reasoning out. Or answers cannot
        be told from the rest.
        Without marks: the first message is an answer, or the rendering of a part is not a part of the whole. With marks:
        the template changes marked text, or it cannot be told which weight a span has.
    """
    template = tokenizer.get_chat_template(tools=tools)
    check_template(template, messages, tools)
    check_reasoning(template, messages)
    messages, tools = as_template_wants(tokenizer, messages, tools)
    has_marks = bool(GENERATION_TAG.search(template))
    if has_marks:
        text, spans = marked_spans(template, messages, partial(_render, tokenizer, tools=tools))
    else:
        text = _render(tokenizer, messages, tools)
        spans = _found_spans(tokenizer, messages, tools, text)
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


def _found_spans(tokenizer, messages: list[dict[str, Any]], tools, text: str) -> list[Span]:
    """Returns the answers in `text` whose weight is not 0, for a template without marks."""
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "the conversation begins with the assistant's message, and an answer is found behind the messages before it; put a "
            "system or user message first, or use a template that marks answers with {% generation %} ... {% endgeneration %}"
        )
    learned = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight", 1)]
    return [Span(*_span(tokenizer, messages, tools, i, text), messages[i].get("weight", 1)) for i in learned]


def _span(tokenizer, messages: list[dict[str, Any]], tools, i: int, text: str) -> tuple[int, int]:
    """Returns (start, end) of answer i in `text`: from the end of the generation prompt through the end of the turn."""
    before = _render(tokenizer, messages[:i], tools, add_generation_prompt=True)
    end = len(text) - _after_content(tokenizer, messages, tools, i, text)
    # Templates may render an answer differently when it comes last (Qwen3 adds an empty <think>), so what follows the
    # content is read off a rendering that ends with this answer, and looked for in the whole.
    up_to = messages[: i + 1]
    alone = _render(tokenizer, up_to, tools)
    turn_end = alone[len(alone) - _after_content(tokenizer, up_to, tools, i, alone) :]
    # Without content, what stands behind it may begin with characters of the generation prompt: Qwen3 writes a line break
    # before tool calls if there is content, and another one ends the prompt.
    if not text.startswith(before) or end + len(turn_end) < len(before) or not text.startswith(turn_end, end):
        raise ValueError(
            f"the tokenizer's chat template renders the messages before answer {i} differently by themselves than in the "
            "whole conversation, so the assistant's tokens cannot be found; use a template that marks them with "
            "{% generation %} ... {% endgeneration %}"
        )
    # The model stops at the end-of-turn token; the line break that templates put behind it is not the model's.
    return len(before), end + (len(turn_end.rstrip()) or len(turn_end))


def _after_content(tokenizer, messages: list[dict[str, Any]], tools, i: int, text: str) -> int:
    """Counts the characters of the rendering `text` after the content of message i."""
    common = len(text)
    # Two stand-ins with different last characters: at most one of them can end as the content does.
    for stand_in in ("x1", "x2"):
        other = _render(tokenizer, [*messages[:i], {**messages[i], "content": stand_in}, *messages[i + 1 :]], tools)
        common = min(common, len(commonprefix([text[::-1], other[::-1]])))
    return common


def _render(tokenizer, messages, tools, **options) -> str:
    """Renders the messages with the chat template, or with the one in `chat_template`."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # templates raise whatever they like, jinja's TemplateError mostly
        raise ValueError(f"the tokenizer's chat template refuses the first {len(messages)} messages: {error}") from error
