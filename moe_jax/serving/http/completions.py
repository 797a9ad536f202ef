"""POST /v1/completions and /v1/chat/completions: continues texts or lists of token ids, and answers conversations."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.generation.text import chat_prompts, completion_tokens
from moe_jax.generation.tool_calls import (
    END_OF_THOUGHT,
    FORMATS,
    THINK,
    AnswerParts,
    HarmonyParts,
    format_of,
    schemas_of,
)
from moe_jax.serving.http.answers import ChatAnswer, CompletionAnswer
from moe_jax.serving.http.body import SHARED, ApiError, delivery, read_body, refuse_others, sampling_options, take, truncated
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
    wanted = delivery(body)
    prompts = _prompts(body.get("prompt"), service.settings.max_choices)
    if isinstance(prompts[0], str):
        for prompt in prompts:
            service.check_length(prompt, "prompt")
        tokens = await service.encode(lambda: completion_tokens(service.tokenizer, prompts), record, "prompt")
    else:
        tokens = prompts
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
    wanted = delivery(body)
    take(body, "parallel_tool_calls", bool)
    encode = conversation_encoder(service.tokenizer, body, lambda text: service.check_length(text, "messages"))
    (tokens,) = truncated(body, await service.encode(encode, record, "messages"))
    parts_of_choice, shows_special = _reading(service.tokenizer, body, tokens)
    options = replace(options, skip_special_tokens=options.skip_special_tokens and not shows_special)
    forced = _forced(service.tokenizer, body)
    # Clients of chats send the same max_tokens with each message, while the conversation grows.
    choices = service.submit([tokens], fitted(options, tokens, service.engine.limits), "messages")
    record.prompt_tokens = len(tokens)
    parts = [parts_of_choice() for _ in choices]
    for each in parts:
        each.add(forced)
    return await ChatAnswer(service, choices, body, record, wanted, parts=parts).respond(request)


def _reading(tokenizer: Any, body: dict[str, Any], tokens: list[int]) -> tuple[Callable[[], AnswerParts], bool]:
    """Returns a function that returns the empty parts of an answer, and whether special tokens mark its thoughts or calls."""
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    template, schemas = _template(tokenizer, tools), schemas_of(body.get("tools", ()))
    name = format_of(template) if tools else None
    continues = "continue_final_message" in body
    if format_of(template) == "harmony":
        return partial(HarmonyParts, FORMATS["harmony"] if tools else None, schemas, in_text=continues), True
    continued = _with_joined_text(body["messages"][-1])["content"] if continues else tokenizer.decode(tokens[-8:])
    begins = continued.rfind(THINK) > continued.rfind(END_OF_THOUGHT) if END_OF_THOUGHT in template else None
    markers = {THINK, *([FORMATS[name].begin] if name else [])}
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    return partial(AnswerParts, begins, FORMATS[name] if name else None, schemas), bool(markers & special)


def _template(tokenizer: Any, tools: list | None) -> str:
    """Returns the chat template for these tools; "" if there is none."""
    return tokenizer.get_chat_template(tools=tools or None) if tokenizer.chat_template else ""


def _forced(tokenizer: Any, body: dict[str, Any]) -> str:
    """Returns the beginning of an answer that must call a tool; "" if it need not.

    Raises:
        ApiError: The choice is malformed, its tool is not among the tools, or the model's format of calls is unknown.
    """
    choice, tools = take(body, "tool_choice", (str, dict), "auto"), take(body, "tools", list, [])
    if choice in ("auto", "none"):
        return ""
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    wanted = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(wanted, str):
        raise ApiError(
            400,
            'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    known = [*schemas_of(tools)]
    if not known or wanted is not None and wanted not in known:
        raise ApiError(400, f"tool_choice must name one of the tools {known!r:.200}", param="tool_choice")
    if (name := format_of(_template(tokenizer, tools))) is None:
        raise ApiError(400, "tool_choice must be auto or none: the model's format of calls is unknown", param="tool_choice")
    if wanted is None:
        return FORMATS[name].begin + FORMATS[name].any_tool
    return FORMATS[name].begin + FORMATS[name].forced.format(name=json.dumps(wanted) if name == "hermes" else wanted)


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
    if not all(isinstance(tool, dict) for tool in take(body, "tools", list, [])):
        raise ApiError(400, "tools must be a list of objects", param="tools")
    forced = _forced(tokenizer, body) if "tool_choice" in body else ""
    tools = body.get("tools", []) if body.get("tool_choice") != "none" else []
    continues = take(body, "continue_final_message", bool, False)
    if continues == take(body, "add_generation_prompt", bool, True) or continues and forced:
        wanted = "continue_final_message: true needs add_generation_prompt: false, which has no other use, and no tool_choice"
        raise ApiError(400, wanted, param="add_generation_prompt")
    values = take(body, "chat_template_kwargs", dict, {}) | _effort(tokenizer, take(body, "reasoning_effort", str), tools)
    conversation = [_with_joined_text(message) for message in messages]

    def encode() -> list[list[int]]:
        try:
            tokens = chat_prompts(tokenizer, [conversation], tools or None, values, check, continues=continues)
        except ValueError as error:
            raise ValueError(str(error).replace("template_options", "chat_template_kwargs")) from error
        template = tokenizer.get_chat_template(tools=tools or None)
        if unread := [name for name in values if name not in template]:
            raise ValueError(f"chat_template_kwargs: the model's chat template never mentions {', '.join(unread):.200}")
        if forced:
            # A thought that the template begins would hide the call.
            ends = END_OF_THOUGHT + "\n\n" if tokenizer.decode(tokens[0][-8:]).rstrip().endswith(THINK) else ""
            tokens[0] += tokenizer(ends + forced, add_special_tokens=False)["input_ids"]
        return tokens

    return encode


def _effort(tokenizer: Any, effort: str | None, tools: list) -> dict[str, Any]:
    """Returns the chat template's option for a `reasoning_effort`: the effort itself, or whether the model thinks.

    Raises:
        ApiError: The template has neither.
    """
    if effort is None:
        return {}
    template = _template(tokenizer, tools)
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" not in template:
        raise ApiError(400, "reasoning_effort: the model's chat template has no such option", param="reasoning_effort")
    return {"enable_thinking": effort not in ("none", "minimal")}


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content joined to one text, if a client sent a list of texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, "the content of a message must be text, or parts of the type text", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}
