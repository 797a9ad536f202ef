"""The log-probabilities of tokens in the two shapes that OpenAI's API has for them."""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from moe_jax.serving.http.choices import TokenLogprob
from moe_jax.serving.text import REPLACEMENT


def completion_logprobs(tokenizer: Any, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Returns the lists that a text completion has; `offset` is the number of characters before the first token."""
    texts = [token_text(tokenizer, each.token) for each in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_by_text(tokenizer, each) if each.top else None for each in tokens],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


def _by_text(tokenizer: Any, drawn: TokenLogprob) -> dict[str, float]:
    """Returns the alternatives and the drawn token by their texts: of tokens with one text, the likeliest.

    All parts of characters have the same text.
    """
    found: dict[str, float] = {}
    for token, logprob in (drawn.top | {drawn.token: drawn.logprob}).items():
        text = token_text(tokenizer, token)
        found[text] = max(logprob, found.get(text, logprob))
    return found


def chat_logprobs(tokenizer: Any, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns the list of tokens that an answer in a chat has."""
    content = [
        _entry(tokenizer, each.token, each.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in each.top.items()]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


# Kept: an answer of 1,000 tokens with 20 alternatives each asks 21,000 times, and all streams would wait for a second.
@functools.lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token alone."""
    return tokenizer.decode([token])


@functools.lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: Any, token: int) -> list[int] | None:
    """Returns the bytes of a token, also where they are a part of a character; None if the tokenizer does not tell them."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece.startswith("<0x"):
        return [int(piece[3:5], 16)]
    table = _byte_of_letter()
    return [table[letter] for letter in piece] if set(piece) <= table.keys() else None


def _entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte of each letter of byte-level BPE: printable bytes stand for themselves, others for letters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
