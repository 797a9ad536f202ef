"""The fields that completions and chats share: how tokens are drawn, when a text ends, and how it is sent."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_jax.serving.defaults import Defaults
from moe_jax.serving.http.body import asking, take
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.request import SamplingOptions

SHARED = {
    "frequency_penalty", "ignore_eos", "logit_bias", "max_tokens", "min_p", "model", "n", "presence_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "stream", "stream_options", "temperature", "top_k", "top_p",
}  # fmt: skip

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
"""Largest number and length of stop texts: each new token is compared with their beginnings."""


class Delivery(NamedTuple):
    """The form in which a client wants its texts."""

    stream: bool
    include_usage: bool
    """True: a stream ends with the numbers of tokens."""


def sampling_options(
    body: Mapping[str, Any], defaults: Defaults, ends: tuple[int, ...], *, max_new_tokens: int | None, logprobs: int | None
) -> SamplingOptions:
    """Returns the options that a body asks for. Ranges are checked with the prompt, by the engine.

    Args:
        ends: Tokens that end a text, unless the body ignores them.
        max_new_tokens: None: 0, for as many as there is room for.
        logprobs: Number of alternatives beside each token.

    Raises:
        ApiError: A field has a wrong type.
    """
    number = (int, float)
    ignores_ends = take(body, "ignore_eos", bool, False)
    return SamplingOptions(
        max_new_tokens=0 if max_new_tokens is None else max_new_tokens,
        temperature=take(body, "temperature", number, defaults.temperature),
        # Other servers write "no restriction" as 0 or -1.
        top_k=_none_if(take(body, "top_k", int, defaults.top_k), (0, -1)),
        top_p=take(body, "top_p", number, defaults.top_p),
        min_p=take(body, "min_p", number, defaults.min_p),
        repetition_penalty=take(body, "repetition_penalty", number, defaults.repetition_penalty),
        presence_penalty=take(body, "presence_penalty", number, 0.0),
        frequency_penalty=take(body, "frequency_penalty", number, 0.0),
        logit_bias=_logit_bias(take(body, "logit_bias", dict, {})),
        stop_token_ids=(*(() if ignores_ends else ends), *_token_ids(body)),
        stop=_stop(take(body, "stop", (str, list), [])),
        ignore_eos=ignores_ends,
        # Clients send up to 64 bits, and negative ones.
        seed=None if (seed := take(body, "seed", int)) is None else seed % 2**32,
        n=take(body, "n", int, 1),
        logprobs=logprobs,
    )


def delivery(body: Mapping[str, Any]) -> Delivery:
    """Returns the form in which a body asks for its texts."""
    options = asking(take(body, "stream_options", dict, {}))
    if others := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ApiError(400, f"unknown fields of stream_options: {', '.join(others)[:200]}", param="stream_options")
    return Delivery(take(body, "stream", bool, False), bool(take(options, "include_usage", bool, False)))


def _stop(value: str | list) -> tuple[str, ...]:
    stop = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stop) or len(stop) > MAX_STOPS:
        raise ApiError(
            400, f"stop must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters; got {value!r:.80}", param="stop"
        )
    return stop


def _token_ids(body: Mapping[str, Any]) -> list[int]:
    ids = take(body, "stop_token_ids", list, [])
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids) or len(ids) > 64:
        raise ApiError(400, f"stop_token_ids must be at most 64 integers; got {ids!r:.80}", param="stop_token_ids")
    return ids


def _logit_bias(given: dict) -> dict[int, float]:
    if not all(token.isdecimal() and len(token) < 20 for token in given):
        raise ApiError(400, f"logit_bias must have token ids as its names; got {list(given)!r:.80}", param="logit_bias")
    return {int(token): take(given, token, (int, float)) for token in given}


def _none_if(value: Any, meaning_none: tuple) -> Any:
    return None if value in meaning_none else value
