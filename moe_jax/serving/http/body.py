"""Reads and checks the JSON body of a request, within limits of size and time; and the errors that refuse it."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from moe_jax.serving.conversation import Defaults
from moe_jax.serving.grammar import choice_grammar, free_grammar, json_grammar, regex_grammar
from moe_jax.serving.request import SamplingOptions

HARMLESS = {
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
"""Fields of OpenAI's API that have no effect on answers here."""

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
    "parallel_tool_calls": True,
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
"""The value of each field that equals leaving it out, also for unsupported fields."""


async def read_body(request: Request, seconds: float) -> dict[str, Any]:
    """Returns the JSON object in a request's body, without fields that have no effect (`asking`).

    Raises:
        ApiError: It did not arrive in time, is not a JSON object, or has another content type.
    """
    kind = request.headers.get("content-type", "")
    # Another site's web page may send any other type to a server on this machine without a preflight request.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the body must be JSON, with Content-Type: application/json; got {kind[:80]!r}")
    try:
        async with asyncio.timeout(seconds):
            data = await request.body()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from error
    try:
        # From bytes, json would guess the encoding and accept halves of surrogate pairs.
        found = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in data:
            # Half of a surrogate pair is valid JSON but not text: neither a tokenizer nor an answer could hold it.
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
    """Raises ApiError if the body has a field that is neither known nor harmless, and would be ignored."""
    if others := sorted(body.keys() - set(known) - HARMLESS):
        limited = [name for name in others if name in NEUTRAL]
        if limited == others:
            wanted = ", ".join(f"{name} can only be {json.dumps(NEUTRAL[name])}" for name in limited)
            raise ApiError(400, f"{wanted}; got {_shown(body[limited[0]])}", param=limited[0])
        raise ApiError(400, f"unknown fields: {', '.join(others)[:200]}", param=others[0][:80])


def take(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns a field of one of the given types, or `default` if the body lacks it.

    Raises:
        ApiError: The value has another type; true and false are not numbers.
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


SHARED = {
    "allowed_token_ids", "bad_words", "frequency_penalty", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "include_stop_str_in_output", "logit_bias", "max_tokens", "min_p", "min_tokens",
    "model", "n", "presence_penalty", "prompt_logprobs", "repetition_penalty", "response_format", "return_token_ids",
    "seed", "skip_special_tokens", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs",
    "temperature", "top_k", "top_p", "truncate_prompt_tokens",
}  # fmt: skip

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
"""Largest number and length of stop texts and bad words: each new token is compared with them."""

MAX_ALLOWED = 4096
"""Largest number of `allowed_token_ids`."""


def sampling_options(
    body: Mapping[str, Any], defaults: Defaults, ends: tuple[int, ...], *, max_new_tokens: int | None, logprobs: int | None
) -> SamplingOptions:
    """Returns the options that a body requests. The engine checks ranges, together with the prompt.

    Args:
        ends: Tokens that end a text, unless the body ignores them.
        max_new_tokens: None becomes 0, the engine's limit.
        logprobs: Number of alternatives for each token.

    Raises:
        ApiError: A field has a wrong type.
    """
    ignores_ends = take(body, "ignore_eos", bool, False)
    own = {**defaults.sampling, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    drawn = {name: take(body, name, int if name == "top_k" else (int, float), value) for name, value in own.items()}
    # Other servers express "no restriction" as 0 or -1.
    drawn["top_k"] = None if drawn["top_k"] in (0, -1) else drawn["top_k"]
    return SamplingOptions(
        max_new_tokens=max_new_tokens or 0,
        **drawn,
        logit_bias=_logit_bias(take(body, "logit_bias", dict, {})),
        stop_token_ids=(*(() if ignores_ends else ends), *(_token_ids(body, "stop_token_ids", 64) or ())),
        stop=tuple(_texts(body, "stop")),
        ignore_eos=ignores_ends,
        # Clients send up to 64 bits, and negative ones.
        seed=None if (seed := take(body, "seed", int)) is None else seed % 2**32,
        n=take(body, "n", int, 1),
        logprobs=logprobs,
        prompt_logprobs=take(body, "prompt_logprobs", int),
        skip_special_tokens=take(body, "skip_special_tokens", bool, True),
        include_stop=take(body, "include_stop_str_in_output", bool, False),
        min_tokens=take(body, "min_tokens", int, 0),
        bad_words=tuple(_texts(body, "bad_words")),
        allowed_token_ids=_token_ids(body, "allowed_token_ids", MAX_ALLOWED),
    )


def wanted_grammar(body: Mapping[str, Any]) -> str | None:
    """Returns the grammar of the text that a body asks for, in OpenAI's, vLLM's or an older vLLM's fields; None: any text.

    Raises:
        ApiError: A field is malformed, or there are several.
    """
    found: dict[str, tuple[str, Any]] = {}
    wanted = take(body, "response_format", dict, {"type": "text"})
    if (kind := wanted.get("type")) == "json_schema":
        found["response_format"] = "json", take(take(wanted, "json_schema", dict, {}), "schema", (dict, bool))
    elif kind != "text":
        found["response_format"] = "json" if kind == "json_object" else str(kind), {"type": "object"}
    structured = asking(take(body, "structured_outputs", dict, {}))
    found |= {f"structured_outputs.{name}": (name, value) for name, value in structured.items()}
    found |= {name: (name.removeprefix("guided_"), body[name]) for name in GUIDED & body.keys()}
    if not found:
        return None
    (field, (kind, value)), *others = found.items()
    write, kinds = GRAMMARS.get(kind, (None, ()))
    if write is None or others:
        known = "response_format must be text, json_object or json_schema; structured_outputs must have one of "
        raise ApiError(400, f"{known}{', '.join(GRAMMARS)}, and only one field counts; got {', '.join(found)}", param=field)
    if isinstance(value, str) and kind == "json":
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ApiError(400, f"{field} is no valid JSON: {error}", param=field) from error
    is_choice_of_others = kind == "choice" and not (value and all(isinstance(each, str) for each in value))
    if not isinstance(value, kinds) or is_choice_of_others:
        wanted_kinds = " or ".join(_JSON_NAMES[each] for each in kinds)
        raise ApiError(400, f"{field} must be {wanted_kinds}; got {_shown(value)}", param=field)
    return write(value)


GRAMMARS: dict[str, tuple[Callable[[Any], str], tuple[type, ...]]] = {
    "json": (json_grammar, (dict, bool)),
    "json_object": (lambda _: json_grammar(), (bool,)),
    "regex": (regex_grammar, (str,)),
    "choice": (choice_grammar, (list,)),
    "grammar": (free_grammar, (str,)),
}
"""The function that writes a kind of grammar, and the types of its value."""

GUIDED = {"guided_choice", "guided_grammar", "guided_json", "guided_regex"}


def delivery(body: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Returns whether a body asks for a stream, for numbers of tokens at the stream's end, and for token ids."""
    if body.get("stream") is True and "prompt_logprobs" in body:
        raise ApiError(400, "log-probabilities of a prompt cannot be streamed: leave out stream", param="prompt_logprobs")
    options = asking(take(body, "stream_options", dict, {}))
    if others := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ApiError(400, f"unknown fields of stream_options: {', '.join(others)[:200]}", param="stream_options")
    includes_usage = bool(take(options, "include_usage", bool, False))
    return take(body, "stream", bool, False), includes_usage, take(body, "return_token_ids", bool, False)


def truncated(body: Mapping[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Returns the last tokens of each prompt, as many as the body asks for.

    Raises:
        ApiError: The body asks for none.
    """
    most = take(body, "truncate_prompt_tokens", int)
    if most is not None and most < 1:
        raise ApiError(400, f"truncate_prompt_tokens must be at least 1; got {most}", param="truncate_prompt_tokens")
    return prompts if most is None else [prompt[-most:] for prompt in prompts]


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    texts = take(body, name, (str, list), [])
    texts = [texts] if isinstance(texts, str) else texts
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts) or len(texts) > MAX_STOPS:
        wanted = f"{name} must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
        raise ApiError(400, f"{wanted}; got {body[name]!r:.80}", param=name)
    return texts


def _token_ids(body: Mapping[str, Any], name: str, most: int) -> tuple[int, ...] | None:
    """Returns the tokens in a field; None if the body lacks it."""
    ids = take(body, name, list)
    if ids is not None and not (all(type(token) is int for token in ids) and len(ids) <= most):
        raise ApiError(400, f"{name} must be at most {most} integers; got {ids!r:.80}", param=name)
    return ids and tuple(ids)


def _logit_bias(given: dict) -> dict[int, float]:
    if not all(token.isdecimal() and len(token) < 20 for token in given):
        raise ApiError(400, f"logit_bias must have token ids as its names; got {list(given)!r:.80}", param="logit_bias")
    return {int(token): take(given, token, (int, float)) for token in given}


NAMES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
"""The `type` of an error by status; invalid_request_error for others."""


class ApiError(Exception):
    """A request without a result; `param` names the wrong field of its body, if any.

    `closes`: its connection is closed after the answer.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, closes: bool = False):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.closes = closes

    @property
    def body(self) -> dict:
        """The error as JSON."""
        kind = NAMES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The whole answer; for a temporary error it includes the time to retry."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


class DisconnectedError(Exception):
    """The client has closed its connection."""


def took_too_long(seconds: float) -> ApiError:
    """Returns the error of a request that timed out."""
    return ApiError(504, f"the request took longer than {seconds:g} seconds")
