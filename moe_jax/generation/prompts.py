"""Prompts as arrays, and what was produced as lists again."""

import numpy as np
from jaxtyping import Int

PROMPT_BUCKET = 64
"""Prompt lengths are padded to a multiple of this many tokens, so that prompts of similar lengths share a compilation."""


def as_prompts(prompt_tokens, vocab_size: int) -> tuple[list[list[int]], bool]:
    """The prompts as lists of ints, and whether one flat prompt was given."""
    rows = prompt_tokens.tolist() if hasattr(prompt_tokens, "tolist") else list(prompt_tokens)
    single = bool(rows) and np.ndim(rows[0]) == 0
    rows = [rows] if single else rows
    prompts = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    if not prompts or not all(prompts):
        raise ValueError("prompt_tokens must hold at least one prompt of at least one token; got " + repr(prompts)[:80])
    for row, prompt in enumerate(prompts):
        for token in prompt:
            if isinstance(token, bool) or int(token) != token or not 0 <= token < vocab_size:
                raise ValueError(f"prompt {row} holds {token!r}; token ids are integers from 0 to {vocab_size - 1}")
    return prompts, single


def left_padded(prompts: list[list[int]], multiple: int) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"]]:
    """Tokens and segment ids, the last column the last token of every prompt; rows of padding make a multiple of so many."""
    padded_length = -(-max(map(len, prompts)) // PROMPT_BUCKET) * PROMPT_BUCKET
    rows = -(-len(prompts) // multiple) * multiple
    tokens = np.zeros((rows, padded_length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, padded_length - len(prompt) :] = prompt
        segment_ids[row, padded_length - len(prompt) :] = 1
    return tokens, segment_ids


def new_tokens(
    produced: Int[np.ndarray, "batch max_new_tokens"], lengths: Int[np.ndarray, "batch"], single: bool
) -> list[list[int]] | list[int]:
    """The valid ones of each row; of the only row where one flat prompt was given."""
    rows = [row[:length].tolist() for row, length in zip(produced, lengths, strict=True)]
    return rows[0] if single else rows
