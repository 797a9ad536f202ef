"""Prompts and answers as tokens, with a mask of the answers' tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from moe_jax.checkpoint.tokenizer import beginning, begun, ended
from moe_jax.preferences.documents import Judged, Messages, Preferences
from moe_jax.train.data.chat import chat_tokens

MAX_STEPS_BACK = 100
"""An answer to another prompt is searched among this many records before the prompt's own."""


class Text(NamedTuple):
    """A prompt with an answer."""

    tokens: Int[np.ndarray, "length"]
    learned: Bool[np.ndarray, "length"]
    """True for the answer's tokens."""


class Example(NamedTuple):
    """A record as tokens.

    Attributes:
      number: the record's index in its data.
      texts: the prompt with the chosen and with the rejected answer, or with the single answer.
      mismatched: the prompt with an answer to another prompt, for single answers.
      desirable: of a single answer.
    """

    number: int
    texts: tuple[Text, ...]
    mismatched: Text | None = None
    desirable: bool | None = None


def example_tokens(preferences: Preferences, tokenizer: Any, max_length: int) -> Callable[[int], Example | None]:
    """Returns the function that tokenizes record `index`, or returns None for one with nothing to learn.

    Its prompt leaves no room for its answers, or both texts of a pair are equal, perhaps after the cut.

    The chat template renders messages, and the answer's tokens are those that fine-tuning on chats would learn. Plain texts
    begin with the BOS token of tokenizers that add one, and end with the eos token, unless they were written with these. Texts
    are cut after `max_length` tokens.

    Raises:
      ValueError: the tokenizer has no eos token for plain text. The function raises it for messages that the chat template
        cannot render, by file and line.
    """
    begin = beginning(tokenizer)

    def text_of(found: Judged, answer: Any) -> Text:
        if isinstance(found.prompt, str):
            whole = _plain(tokenizer, begin, found.prompt, answer)
        else:
            whole = _chat(tokenizer, found.prompt, answer, found.tools)
        return Text(whole.tokens[:max_length], whole.learned[:max_length])

    def example(index: int) -> Example | None:
        found = preferences[index]
        try:
            texts = tuple(text_of(found, answer) for answer in found.answers)
            other = None if preferences.of_pairs else text_of(found, _answer_to_another(preferences, index, found))
        except ValueError as error:
            raise ValueError(f"{preferences.where(index)}: {error}") from error
        all_texts = texts if other is None else (*texts, other)
        if not all(text.learned[1:].any() for text in all_texts) or (len(texts) == 2 and all(map(np.array_equal, *texts))):
            return None
        return Example(index, texts, other, found.desirable)

    return example


def _answer_to_another(preferences: Preferences, index: int, found: Judged) -> str | Messages:
    """Returns the answer of the nearest record before `index` that has another prompt and is text or messages alike."""
    for back in range(1, min(MAX_STEPS_BACK, len(preferences) - 1) + 1):
        other = preferences[(index - back) % len(preferences)]
        if other.prompt != found.prompt and isinstance(other.prompt, str) == isinstance(found.prompt, str):
            return other.answers[0]
    raise ValueError(f"no other prompt among the {MAX_STEPS_BACK} records before, and KTO's baseline needs an answer to one")


def _chat(tokenizer: Any, prompt: Messages, answer: Messages, tools: list | None) -> Text:
    # Earlier answers belong to the prompt.
    masked = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
    return Text(*chat_tokens(tokenizer, [*masked, *answer], tools))


def _plain(tokenizer: Any, begin: list[int], prompt: str, answer: str) -> Text:
    if tokenizer.eos_token_id is None:
        raise ValueError("plain text needs a tokenizer with an eos token to end answers with; this one has none")
    of_prompt, of_both = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (prompt, prompt + answer)
    )
    # Tokens that reach over the end of the prompt belong to the answer.
    differ = (i for i, (a, b) in enumerate(zip(of_prompt, of_both, strict=False)) if a != b)
    whole = begun(begin, of_both)
    shared = len(whole) - len(of_both) + next(differ, min(len(of_prompt), len(of_both)))
    tokens = np.asarray(ended(tokenizer, whole), np.int32)
    return Text(tokens, np.arange(len(tokens)) >= shared)
