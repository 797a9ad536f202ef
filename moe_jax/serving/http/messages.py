"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, which several agents speak."""

import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moe_jax.serving.chat import prepare
from moe_jax.serving.http.blocks import Block, BlockAnswer, Events, renamed, text_of
from moe_jax.serving.http.body import ApiError, asking, read_body, take
from moe_jax.serving.http.completions import answer_conversation, chat_request
from moe_jax.serving.http.record import record_of
from moe_jax.serving.http.service import Service

NAMES = {name: name for name in ("max_tokens", "model", "stream", "temperature", "top_k", "top_p")} | {"stop_sequences": "stop"}
"""Fields that a chat's body has too, and their names there."""

OTHERS = {"cache_control", "messages", "output_config", "system", "thinking", "tool_choice", "tools"}
"""Fields of another form; `cache_control` has no effect, because all prompts are cached."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""A chat's `tool_choice` for each type that names no tool."""


async def answer_message(service: Service, request: Request) -> Response:
    """Answers a request for a message.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    fields = await read_body(request, service.settings.body_seconds)
    if "max_tokens" not in fields:
        raise ApiError(400, "max_tokens must be an integer, at least 1; the request has none", param="max_tokens")
    return await answer_conversation(service, request, _body(fields), partial(MessageAnswer, fields=fields))


async def answer_count(service: Service, request: Request) -> JSONResponse:
    """Answers with the number of a conversation's tokens."""
    fields = await read_body(request, service.settings.body_seconds)
    wanted = chat_request(_body(fields))
    service.check_model(fields.get("model"))
    prepared = await service.encode(
        lambda: prepare(service.tokenizer, wanted, lambda: service.engine.grammars), record_of(request), "messages"
    )
    return JSONResponse({"input_tokens": len(prepared.tokens)})


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of the same request for a chat."""
    body = renamed(fields, NAMES, dict.fromkeys(OTHERS))
    system = [] if "system" not in fields else [{"role": "system", "content": text_of(fields["system"], "system")}]
    body["messages"] = [*system, *(each for message in take(fields, "messages", list, []) for each in _messages(message))]
    if tools := take(fields, "tools", list, []):
        body["tools"] = [_tool(tool) for tool in tools]
    choice = take(fields, "tool_choice", dict, {"type": "auto"})
    named = {"type": "function", "function": {"name": choice.get("name")}}
    body["tool_choice"] = named if choice.get("type") == "tool" else CHOICES.get(str(choice.get("type")), "unknown")
    body["parallel_tool_calls"] = not take(choice, "disable_parallel_tool_use", bool, False)
    output = asking(take(fields, "output_config", dict, {}))
    if others := sorted(output.keys() - {"effort", "format"}):
        raise ApiError(400, f"unknown fields of output_config: {', '.join(others)[:200]}", param="output_config")
    if (form := take(output, "format", dict)) is not None:
        body["response_format"] = form | ({"json_schema": form} if form.get("type") == "json_schema" else {})
    if (effort := take(output, "effort", str)) is not None:
        body["reasoning_effort"] = effort
    if (thinking := take(fields, "thinking", dict, {}).get("type")) == "disabled" or thinking == "enabled" and effort is None:
        body["reasoning_effort"] = "high" if thinking == "enabled" else "none"
    return body


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise ApiError(400, f'tools must be a list of {{"name": ..., "input_schema": ...}}; got {tool!r:.80}', param="tools")
    function = {"name": tool.get("name"), "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: Any) -> list[dict[str, Any]]:
    """Returns a message as messages of a chat: results of tools, which are blocks of a user's message, come first."""
    if not isinstance(message, dict):
        raise ApiError(400, f"messages must be a list of objects; got {message!r:.80}", param="messages")
    content, made, text = message.get("content"), dict[str, Any](role=message.get("role")), list[str]()
    results: list[dict[str, Any]] = []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text.append(text_of(block.get("text"), "messages"))
        elif kind == "thinking":
            made["reasoning_content"] = made.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            call = {"id": block.get("id"), "type": "function", "function": function}
            made["tool_calls"] = [*made.get("tool_calls", ()), call]
        elif kind == "tool_result":
            result = text_of(block.get("content") or "", "messages")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind != "redacted_thinking":
            wanted = "text, thinking, tool_use and tool_result"
            raise ApiError(400, f"blocks of a message can be {wanted}; got {block!r:.80}", param="messages")
    return [*results, made | {"content": "".join(text)}] if text or not results else results


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a block's delta, and the field of its text."""


class MessageAnswer(BlockAnswer):
    """The answer of /v1/messages."""

    def _shown(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
            "content": [_block(block) for block in self.blocks],
            "stop_reason": self.reason and REASONS[self.reason],
            "stop_sequence": None,
            "usage": self._counts(),
        }

    def _first_events(self) -> Events:
        return [{"type": "message_start", "message": self._shown()}]

    def _begun(self, block: Block) -> Events:
        empty = Block(block.kind, block.index, "", block.name, block.id)
        return [{"type": "content_block_start", "index": block.index, "content_block": _block(empty)}]

    def _delta(self, block: Block, text: str) -> Events:
        kind, field = DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: text}}]

    def _ended(self, block: Block) -> Events:
        return [{"type": "content_block_stop", "index": block.index}]

    def _last_events(self, error: ApiError | None) -> Events:
        if error is not None:
            return [{"type": "error", **error.body}]
        whole = self._shown()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": whole["usage"]}, {"type": "message_stop"}]

    def _counts(self) -> dict[str, int]:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        read = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]} | read


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": json.loads(block.text or "{}")}
