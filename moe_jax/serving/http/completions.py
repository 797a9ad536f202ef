"""POST /v1/completions and /v1/chat/completions: continues texts or lists of token ids, and answers conversations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.generation.text import completion_tokens
from moe_jax.serving.chat import ChatRequest, prepare
from moe_jax.serving.http.answers import ChatAnswer, CompletionAnswer
from moe_jax.serving.http.body import (
    SHARED,
    ApiError,
    delivery,
    read_body,
    refuse_others,
    sampling_options,
    take,
    truncated,
    wanted_grammar,
)
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
    adapter = service.check_model(body.get("model"))
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
    options = replace(options, adapter=adapter)
    wanted = delivery(body)
    prompts = _prompts(body.get("prompt"), service.settings.max_choices)
    if isinstance(prompts[0], str):
        for prompt in prompts:
            service.check_length(prompt, "prompt")
        tokens = await service.encode(lambda: completion_tokens(service.tokenizer, prompts), record, "prompt")
    else:
        tokens = prompts
    if (grammar := wanted_grammar(body)) is not None:
        await service.encode(lambda: service.engine.grammars.compiled(grammar), record, "structured_outputs")
        options = replace(options, grammar=grammar)
    kept = truncated(body, tokens)
    is_shown = isinstance(prompts[0], str) and kept is tokens
    echoed = prompts if is_shown else await service.decode(kept, record, "prompt") if echo else []
    tokens = kept
    choices = service.submit(tokens, options, "prompt")
    record.prompt_tokens = sum(map(len, tokens))
    begins = [text for text in echoed for _ in range(options.n)] if echo else [""] * len(choices)
    return await CompletionAnswer(service, choices, body, record, wanted, begins=begins).respond(request)


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


CONVERSATION = {
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "messages", "reasoning_effort", "tool_choice",
    "tools",
}  # fmt: skip
"""Fields that make a chat's prompt."""

CHAT_FIELDS = SHARED | {
    "logprobs", "max_completion_tokens", "parallel_tool_calls", "top_logprobs", *CONVERSATION,
}  # fmt: skip


async def answer_chat(service: Service, request: Request) -> Response:
    """Answers a request for the next message of a conversation.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    return await answer_conversation(service, request, await read_body(request, service.settings.body_seconds), ChatAnswer)


async def answer_conversation(
    service: Service, request: Request, body: dict[str, Any], answer: Callable[..., ChatAnswer]
) -> Response:
    """Answers a body of /v1/chat/completions in the form of `answer`; errors as in `answer_chat`."""
    record = record_of(request)
    refuse_others(body, CHAT_FIELDS)
    adapter = service.check_model(body.get("model"))
    logprobs = take(body, "top_logprobs", int, 0) if take(body, "logprobs", bool, False) else None
    if logprobs is None and "top_logprobs" in body:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    field = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    length = take(body, field, int)
    if length is not None and length < 1:
        raise ApiError(400, f"{field} must be at least 1; got {length}", param=field)
    ends = service.defaults.ends_of_answers
    options = replace(sampling_options(body, service.defaults, ends, max_new_tokens=length, logprobs=logprobs), adapter=adapter)
    way = delivery(body)
    wanted = chat_request(body)
    check = lambda text: service.check_length(text, "messages")  # noqa: E731
    prepared = await service.encode(
        lambda: prepare(service.tokenizer, wanted, lambda: service.engine.grammars, check), record, "messages"
    )
    (tokens,) = truncated(body, [prepared.tokens])
    # Clients of chats send the same max_tokens with each message, while the conversation grows.
    options = fitted(prepared.options(options), tokens, service.engine.limits)
    choices = service.submit([tokens], options, "messages")
    record.prompt_tokens = len(tokens)
    return await answer(service, choices, body, record, way, parts=[prepared.parts() for _ in choices]).respond(request)


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Returns the conversation of a body.

    Raises:
        ApiError: The conversation, its tools or the values for the template have a wrong type.
    """
    messages = take(body, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, 'messages must be a list of {"role": ..., "content": ...}, not empty', param="messages")
    tools = take(body, "tools", list, [])
    if not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools must be a list of objects", param="tools")
    continues = take(body, "continue_final_message", bool, False)
    if continues == take(body, "add_generation_prompt", bool, True):
        wanted = "continue_final_message: true needs add_generation_prompt: false, which has no other use"
        raise ApiError(400, wanted, param="add_generation_prompt")
    return ChatRequest(
        [_with_joined_text(message) for message in messages],
        tools,
        take(body, "tool_choice", (str, dict), "auto"),
        one_call=not take(body, "parallel_tool_calls", bool, True),
        values=take(body, "chat_template_kwargs", dict, {}),
        effort=take(body, "reasoning_effort", str),
        continues=continues,
        grammar=wanted_grammar(body),
    )


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content joined to one text, if a client sent a list of texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, "the content of a message must be text, or parts of the type text", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}
