"""POST /v1/completions: continues texts, or lists of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.generation.text import completion_tokens
from moe_jax.serving.http.answers import Answer
from moe_jax.serving.http.body import read_body, refuse_others, take
from moe_jax.serving.http.choices import TextPiece
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.http.fields import SHARED, delivery, sampling_options
from moe_jax.serving.http.logprobs import completion_logprobs
from moe_jax.serving.http.record import record_of
from moe_jax.serving.http.service import Service

FIELDS = SHARED | {"best_of", "echo", "logprobs", "prompt"}


async def answer_completion(service: Service, request: Request) -> Response:
    """Answers a request for completions.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, FIELDS)
    service.check_model(body.get("model"))
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise ApiError(400, f"best_of can only be n, {body.get('n', 1)!r:.80}; got {body['best_of']!r:.80}", param="best_of")
    echo, logprobs = take(body, "echo", bool, False), take(body, "logprobs", int)
    if echo and logprobs is not None:
        raise ApiError(400, "log-probabilities of the prompt are not supported: leave out echo or logprobs", param="echo")
    # OpenAI's default is 16 too.
    length = take(body, "max_tokens", int, 16)
    if length < 1:
        raise ApiError(400, f"max_tokens must be at least 1; got {length}", param="max_tokens")
    options = sampling_options(body, service.defaults, service.defaults.ends, max_new_tokens=length, logprobs=logprobs)
    how = delivery(body)
    prompts = _prompts(body.get("prompt"), service.settings.max_choices)
    if isinstance(prompts[0], str):
        for prompt in prompts:
            service.check_length(prompt, "prompt")
        tokens = await service.encode(lambda: completion_tokens(service.tokenizer, prompts), record, "prompt")
        echoed = prompts
    else:
        tokens, echoed = prompts, await service.decode(prompts, record, "prompt") if echo else []
    choices = service.submit(tokens, options, "prompt")
    record.prompt_tokens = sum(map(len, tokens))
    begins = [text for text in echoed for _ in range(options.n)] if echo else [""] * len(choices)
    return await Answer(service, choices, _CompletionShape(service.tokenizer, begins), how, record).respond(request)


def _prompts(given: Any, limit: int) -> list:
    """Returns the prompts, all as texts or all as lists of ids; the engine checks the ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_ids(given):
            return [given]
        if all(isinstance(prompt, str) for prompt in given) or all(map(_are_ids, given)):
            if len(given) > limit:
                raise ApiError(400, f"prompt has {len(given)} texts; a request may have {limit}", param="prompt")
            return given
    raise ApiError(400, "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt")


def _are_ids(given: Any) -> bool:
    # True is an integer in Python, and no token.
    return isinstance(given, list) and all(type(token) is int for token in given)


@dataclass
class _CompletionShape:
    tokenizer: Any
    begins: list[str]
    """Text before each choice."""
    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __post_init__(self):
        self._offsets = [len(begin) for begin in self.begins]

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        index = pieces[0].index
        logprobs = [each for piece in pieces for each in piece.logprobs]
        return self._choice(pieces[-1], self.begins[index] + "".join(piece.text for piece in pieces), logprobs)

    def chunk(self, piece: TextPiece, *, is_first: bool) -> dict[str, Any]:
        return self._choice(piece, (self.begins[piece.index] if is_first else "") + piece.text, piece.logprobs)

    def _choice(self, last: TextPiece, text: str, logprobs: list) -> dict[str, Any]:
        found = None
        if logprobs:
            found = completion_logprobs(self.tokenizer, logprobs, self._offsets[last.index])
            self._offsets[last.index] += sum(map(len, found["tokens"]))
        return {"index": last.index, "text": text, "logprobs": found, "finish_reason": last.finish_reason}
