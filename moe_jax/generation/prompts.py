"""Converts prompts to padded arrays, and the arrays of new tokens to lists."""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Int

PROMPT_BUCKET = 64
"""Prompt lengths are padded to a multiple of this many tokens, so that prompts of similar lengths share a compilation."""


def as_prompts(
    prompt_tokens: Any, vocab_size: int, attention_mask: Any = None, padding_ids: Collection[int] = ()
) -> tuple[list[list[int]], bool]:
    """Returns the prompts as lists of ints, and True if one flat prompt was given.

    Args:
      attention_mask: 1 for tokens of a prompt and 0 for padding, in the shape of `prompt_tokens`.
      padding_ids: the tokens that tokenizers use to pad this model's prompts.

    Raises:
      ValueError: text or a tokenizer's result in place of ids; an empty prompt; or an id outside the vocabulary. Also a mask
        that does not fit, or prompts that look padded and have no mask.
    """
    _refuse_text(prompt_tokens)
    rows, single = _rows(prompt_tokens, "prompt_tokens")
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    elif pad := _padding_in(rows, padding_ids):
        raise ValueError(
            f"prompt_tokens {pad}, which pads prompts of unequal lengths: pass the tokenizer's attention_mask too, or prompts "
            "without padding. If they are meant as they are, pass attention_mask=np.ones_like(prompt_tokens)"
        )
    if not rows or not all(rows):
        raise ValueError("prompt_tokens must hold at least one prompt of at least one token; got " + repr(rows)[:80])
    return [[_token_id(token, number, vocab_size) for token in row] for number, row in enumerate(rows)], single


def left_padded(prompts: list[list[int]], multiple: int) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"]]:
    """Returns tokens and segment ids, padded on the left, with rows of padding up to a `multiple` of rows."""
    padded_length = -(-max(map(len, prompts)) // PROMPT_BUCKET) * PROMPT_BUCKET
    rows = -(-len(prompts) // multiple) * multiple
    tokens = np.zeros((rows, padded_length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, padded_length - len(prompt) :] = prompt
        segment_ids[row, padded_length - len(prompt) :] = 1
    return tokens, segment_ids


def new_tokens(
    produced: Int[Array | np.ndarray, "batch max_new_tokens"], lengths: Int[Array | np.ndarray, "batch"], single: bool
) -> list[list[int]] | list[int]:
    """Returns the valid tokens of each row, or of the only row if `single` (one flat prompt was given)."""
    rows = [row[:length].tolist() for row, length in zip(produced, lengths, strict=True)]
    return rows[0] if single else rows


def _refuse_text(prompts: Any) -> None:
    """Raises ValueError with the call that is right for text, messages, or a tokenizer's result."""
    wrong = "prompt_tokens must be token ids; got"
    first = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(prompts, str):
        raise ValueError(f"{wrong} the text {_short(prompts)}: moe_jax.complete(model, {_short(prompts)}) takes text")
    if isinstance(first, str):
        raise ValueError(f"{wrong} a list of texts: moe_jax.complete(model, [{_short(first)}, ...]) takes texts")
    if isinstance(first, Mapping) and "role" in first:
        raise ValueError(f"{wrong} messages: moe_jax.chat(model, messages) takes them")
    if isinstance(prompts, Mapping):
        mask = ", attention_mask=encoded['attention_mask']" if "attention_mask" in prompts else ""
        raise ValueError(f"{wrong} a {type(prompts).__name__}: generate(model, encoded['input_ids']{mask}) takes its contents")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _rows(values: Any, name: str) -> tuple[list[list[Any]], bool]:
    """Returns rows of numbers, and True if there was one flat row."""
    try:
        rows = values.tolist() if hasattr(values, "tolist") else list(values)
        single = bool(rows) and np.ndim(rows[0]) == 0
        rows = [rows] if single else [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError as error:
        raise ValueError(f"{name} must be a list of integers, or a list of such lists; got {values!r:.80}") from error
    return rows, single


def _unpadded(rows: list[list[Any]], attention_mask: Any) -> list[list[Any]]:
    """Returns the tokens of each row at which the mask is 1."""
    masks, _ = _rows(attention_mask, "attention_mask")
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise ValueError(
            f"attention_mask must have prompt_tokens' shape; got rows of {sorted({len(mask) for mask in masks})} for "
            f"{sorted({len(row) for row in rows})} tokens, {len(masks)} for {len(rows)}"
        )
    unpadded = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ones = np.flatnonzero(mask)
        if not set(mask) <= {0, 1} or not ones.size or ones[-1] - ones[0] >= ones.size:
            raise ValueError(
                f"attention_mask must be one run of ones in each row, and zeros before or after it; row {number} is "
                f"{list(map(int, mask))!r:.80}"
            )
        unpadded.append(row[ones[0] : ones[-1] + 1])
    return unpadded


def _padding_in(rows: list[list[Any]], padding_ids: Collection[int]) -> str | None:
    """Describes how rows look padded; None if they do not.

    Rows look padded if a row begins, or ends, with at least two padding tokens. Rows of one length also look padded if some
    begin, or end, with a padding token and others do not.
    """
    one_length = len({len(row) for row in rows}) == 1
    for token in sorted(padding_ids):
        for verb, directed in (("begin", rows), ("end", [row[::-1] for row in rows])):
            padded = sum(row[:1] == [token] for row in directed)
            if any(row[:2] == [token, token] for row in directed) or (one_length and 0 < padded < len(rows)):
                return f"{verb} with the padding token {token} in {padded} of {len(rows)} rows"
    return None


def _token_id(token: Any, number: int, vocab_size: int) -> int:
    try:
        index = operator.index(token)
    except TypeError:
        index = -1
    if isinstance(token, bool) or not 0 <= index < vocab_size:
        raise ValueError(f"prompt {number} holds {token!r}; token ids are integers from 0 to {vocab_size - 1}")
    return index
