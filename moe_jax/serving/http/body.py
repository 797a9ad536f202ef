"""Reads the JSON body of a request: within limits of size and time, and field by field."""

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request

from moe_jax.serving.http.errors import ApiError

HARMLESS = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
"""Fields of OpenAI's API that change no answer here."""

NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": True,
    "bad_words": [],
    "continue_final_message": False,
    "continuous_usage_stats": False,
    "detokenize": True,
    "echo": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "logprobs": False,
    "min_tokens": 0,
    "modalities": ["text"],
    "priority": 0,
    "response_format": {"type": "text"},
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "suffix": "",
    "top_logprobs": 0,
    "typical_p": 1.0,
    "use_beam_search": False,
}
"""The value at which a field asks for what happens without it, also where the field is not supported."""


async def read_body(request: Request, seconds: float) -> dict[str, Any]:
    """Returns the JSON object that a request carries, without fields that ask for nothing (`asking`).

    Raises:
        ApiError: It did not come in time, is no JSON object, or is not called JSON.
    """
    kind = request.headers.get("content-type", "")
    # A web page of another site may send any other type to a server on this machine without asking it first.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the body must be JSON, with Content-Type: application/json; got {kind[:80]!r}")
    try:
        async with asyncio.timeout(seconds):
            data = await request.body()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from error
    try:
        # Bytes would be read as whatever encoding they look like, and with halves of surrogate pairs.
        found = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in data:
            # Half of a surrogate pair is valid JSON and no text: neither a tokenizer nor an answer could hold it.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body must be a JSON object; got {type(found).__name__}")
    return asking(found)


def asking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields without those that are null or have their `NEUTRAL` value: many clients send such defaults."""

    def is_neutral(name: str, value: Any) -> bool:
        neutral = NEUTRAL.get(name)
        # In Python, False is 0.
        return value is None or value == neutral and isinstance(value, bool) == isinstance(neutral, bool)

    return {name: value for name, value in fields.items() if not is_neutral(name, value)}


def refuse_others(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ApiError if the body has a field that is neither known nor harmless: it would be ignored."""
    if others := sorted(body.keys() - set(known) - HARMLESS):
        limited = [name for name in others if name in NEUTRAL]
        if limited == others:
            wanted = ", ".join(f"{name} can only be {json.dumps(NEUTRAL[name])}" for name in limited)
            raise ApiError(400, f"{wanted}; got {_shown(body[limited[0]])}", param=limited[0])
        raise ApiError(400, f"unknown fields: {', '.join(others)[:200]}", param=others[0][:80])


def take(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns a field of one of the given types, or `default` where the body lacks it.

    Raises:
        ApiError: The value has another type; true and false are no numbers.
    """
    value = body.get(name, default)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if name in body and not fits:
        wanted = " or ".join(_JSON_NAMES[kind] for kind in kinds)
        raise ApiError(400, f"{name} must be {wanted}; got {_shown(value)}", param=name)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ApiError(400, f"{name} must be a number of at most 64 bits", param=name)
    return value


_JSON_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
