"""POST /v1/chat/completions: answers conversations, through the tokenizer's chat template."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.generation.text import chat_prompts
from moe_jax.serving.defaults import fitted
from moe_jax.serving.http.answers import Answer
from moe_jax.serving.http.body import read_body, refuse_others, take
from moe_jax.serving.http.choices import TextPiece, TokenLogprob
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.http.fields import SHARED, delivery, sampling_options
from moe_jax.serving.http.logprobs import chat_logprobs
from moe_jax.serving.http.record import record_of
from moe_jax.serving.http.service import Service

FIELDS = SHARED | {
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "messages", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip


async def answer_chat(service: Service, request: Request) -> Response:
    """Answers a request for the next message of a conversation; calls of tools come as the text that the model writes.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, FIELDS)
    service.check_model(body.get("model"))
    logprobs = take(body, "top_logprobs", int, 0) if take(body, "logprobs", bool, False) else None
    if logprobs is None and "top_logprobs" in body:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    field = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    length = take(body, field, int)
    if length is not None and length < 1:
        raise ApiError(400, f"{field} must be at least 1; got {length}", param=field)
    ends = service.defaults.ends_of_answers
    options = sampling_options(body, service.defaults, ends, max_new_tokens=length, logprobs=logprobs)
    how = delivery(body)
    encode = conversation_encoder(service.tokenizer, body, lambda text: service.check_length(text, "messages"))
    (tokens,) = await service.encode(encode, record, "messages")
    # Clients of chats send the same max_tokens with each message, while the conversation grows.
    choices = service.submit([tokens], fitted(options, tokens, service.engine.limits), "messages")
    record.prompt_tokens = len(tokens)
    return await Answer(service, choices, _ChatShape(service.tokenizer), how, record).respond(request)


def conversation_encoder(
    tokenizer: Any, body: dict[str, Any], check: Callable[[str], None] | None = None
) -> Callable[[], list[list[int]]]:
    """Returns a function that returns the tokens of a body's conversation; `check` sees its text first.

    Raises:
        ApiError: The conversation, its tools or the values for the template have a wrong type.
    """
    messages = take(body, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, 'messages must be a list of {"role": ..., "content": ...}, not empty', param="messages")
    choice = take(body, "tool_choice", (str, dict), "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice must be auto or none: a model's calls cannot be forced", param="tool_choice")
    tools = take(body, "tools", list, []) if choice == "auto" else []
    if not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools must be a list of objects", param="tools")
    values = take(body, "chat_template_kwargs", dict, {})
    conversation = [_with_joined_text(message) for message in messages]

    def encode() -> list[list[int]]:
        try:
            tokens = chat_prompts(tokenizer, [conversation], tools or None, values, check)
        except ValueError as error:
            raise ValueError(str(error).replace("template_options", "chat_template_kwargs")) from error
        template = tokenizer.get_chat_template(tools=tools or None)
        if unread := [name for name in values if name not in template]:
            raise ValueError(f"chat_template_kwargs: the model's chat template never mentions {', '.join(unread):.200}")
        return tokens

    return encode


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is one text, where a client has sent it as a list of texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, "the content of a message must be text, or parts of the type text", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}


class _ChatShape:
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        logprobs = [each for piece in pieces for each in piece.logprobs]
        return self._choice(pieces[-1], logprobs) | {"message": message}

    def chunk(self, piece: TextPiece, *, is_first: bool) -> dict[str, Any]:
        delta = ({"role": "assistant"} if is_first else {}) | ({"content": piece.text} if piece.text or is_first else {})
        return self._choice(piece, piece.logprobs) | {"delta": delta}

    def _choice(self, last: TextPiece, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        found = chat_logprobs(self._tokenizer, logprobs) if logprobs else None
        return {"index": last.index, "logprobs": found, "finish_reason": last.finish_reason}
