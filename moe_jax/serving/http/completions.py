"""POST /v1/completions and /v1/chat/completions: continues texts or lists of token ids, and answers conversations."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.generation.text import chat_prompts, completion_tokens
from moe_jax.serving.http.answers import ChatAnswer, CompletionAnswer
from moe_jax.serving.http.body import SHARED, ApiError, delivery, read_body, refuse_others, sampling_options, take
from moe_jax.serving.http.record import record_of
from moe_jax.serving.http.service import Service
from moe_jax.serving.request import fitted

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
        if body.setdefault("prompt_logprobs", logprobs) != logprobs:
            raise ApiError(400, f"with echo, prompt_logprobs can only be logprobs, {logprobs}", param="prompt_logprobs")
    # OpenAI's default is 16 too.
    length = take(body, "max_tokens", int, 16)
    if length < 0:
        raise ApiError(400, f"max_tokens must be at least 0; got {length}", param="max_tokens")
    options = sampling_options(body, service.defaults, service.defaults.ends, max_new_tokens=length, logprobs=logprobs)
    delivery(body)
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
    return await CompletionAnswer(service, choices, body, record, begins=begins).respond(request)


def _prompts(given: Any, limit: int) -> list:
    """Returns the prompts, either all texts or all lists of ids; the engine checks the ids."""
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
    # True is an integer in Python, but not a token.
    return isinstance(given, list) and all(type(token) is int for token in given)


CHAT_FIELDS = SHARED | {
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "messages", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip


async def answer_chat(service: Service, request: Request) -> Response:
    """Answers a request for the next message of a conversation; tool calls are returned as the model's raw text.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, CHAT_FIELDS)
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
    delivery(body)
    encode = conversation_encoder(service.tokenizer, body, lambda text: service.check_length(text, "messages"))
    (tokens,) = await service.encode(encode, record, "messages")
    # Clients of chats send the same max_tokens with each message, while the conversation grows.
    choices = service.submit([tokens], fitted(options, tokens, service.engine.limits), "messages")
    record.prompt_tokens = len(tokens)
    return await ChatAnswer(service, choices, body, record).respond(request)


def conversation_encoder(
    tokenizer: Any, body: dict[str, Any], check: Callable[[str], None] | None = None
) -> Callable[[], list[list[int]]]:
    """Returns a function that returns the tokens of a body's conversation and first passes its text to `check`.

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
    """Returns a message with its content joined to one text, if a client sent a list of texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, "the content of a message must be text, or parts of the type text", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}
