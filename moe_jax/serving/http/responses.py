"""POST /v1/responses: OpenAI's API for agents, as far as it needs no state on the server."""

import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_jax.serving.http.blocks import Block, BlockAnswer, Events, renamed, text_of
from moe_jax.serving.http.body import ApiError, read_body, take
from moe_jax.serving.http.completions import answer_conversation
from moe_jax.serving.http.service import Service

NAMES = {name: name for name in ("model", "parallel_tool_calls", "stream", "temperature", "top_logprobs", "top_p")} | {
    "max_output_tokens": "max_tokens"
}
"""Fields that a chat's body has too, and their names there."""

OTHERS = {"input", "instructions", "reasoning", "text", "tool_choice", "tools"}

ABSENT = {"background": False, "conversation": None, "previous_response_id": None, "prompt": None, "store": False}
"""Fields that would need state on the server, at their only value."""

UNREAD = {"include", "truncation", "stream_options", "max_tool_calls"}
"""Fields that have no effect on answers here."""


async def answer_response(service: Service, request: Request) -> Response:
    """Answers a request for a response.

    Raises:
        ApiError: The request is wrong, or nothing can be computed for it.
    """
    fields = await read_body(request, service.settings.body_seconds)
    for name, value in ABSENT.items():
        if fields.pop(name, value) != value:
            raise ApiError(400, f"the server keeps no responses: {name} can only be {json.dumps(value)}", param=name)
    body = renamed({name: value for name, value in fields.items() if name not in UNREAD}, NAMES, dict.fromkeys(OTHERS))
    if body.pop("top_logprobs", 0):
        raise ApiError(400, "top_logprobs can only be 0: see /v1/chat/completions", param="top_logprobs")
    body["messages"] = _messages(fields)
    if tools := [_tool(tool) for tool in take(fields, "tools", list, [])]:
        body["tools"] = tools
    choice = take(fields, "tool_choice", (str, dict), "auto")
    named = isinstance(choice, dict) and choice.get("type") == "function" and {"name": choice.get("name")}
    body["tool_choice"] = {"type": "function", "function": named} if named else choice
    if (form := take(take(fields, "text", dict, {}), "format", dict)) is not None:
        body["response_format"] = form | ({"json_schema": form} if form.get("type") == "json_schema" else {})
    if (effort := take(take(fields, "reasoning", dict, {}), "effort", str)) is not None:
        body["reasoning_effort"] = effort
    return await answer_conversation(service, request, body, partial(ResponseAnswer, fields=fields))


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(400, f'tools must be a list of {{"type": "function", "name": ...}}; got {tool!r:.80}', param="tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name not in ("type", "strict")}}


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a chat: an answer's thought, text and calls, which are items of their own, become one."""
    given = take(fields, "input", (str, list))
    if not given:
        raise ApiError(400, "input must be a text, or a list of items, not empty", param="input")
    messages: list[dict[str, Any]] = []
    if (instructions := take(fields, "instructions", str)) is not None:
        messages.append({"role": "system", "content": instructions})
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call_output":
            output = text_of(item.get("output"), "input")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), "input")})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item)
        else:
            wanted = "message, reasoning, function_call and function_call_output"
            raise ApiError(400, f"items of input can be {wanted}; got {item!r:.80}", param="input")
    return messages


def _extend(message: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    """Adds an item to an answer."""
    if kind == "message":
        message["content"] += text_of(item.get("content"), "input")
    elif kind == "reasoning":
        message["reasoning_content"] = message.get("reasoning_content", "") + text_of(item.get("content") or [], "input")
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", ()), call]


EVENTS = {
    "reasoning": ("response.reasoning_text", "text"),
    "content": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""The beginning of the names of a block's events, and the field of its whole text."""


class ResponseAnswer(BlockAnswer):
    """The answer of /v1/responses: blocks are items of `output`."""

    _number = 0

    def _shown(self) -> dict[str, Any]:
        usage, cut = self._usage(), self.reason == "length"
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        details = {"reasoning_tokens": self.reasoning_tokens or 0}
        counts |= {"input_tokens_details": usage["prompt_tokens_details"], "output_tokens_details": details}
        shown = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "instructions": None}
        return {name: self.fields.get(name, value) for name, value in shown.items()} | {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model_name,
            "status": "in_progress" if self.reason is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "store": False,
            "output": [_item(block) for block in self.blocks],
            "usage": counts | {"total_tokens": usage["total_tokens"]} if self.reason else None,
        }

    def _first_events(self) -> Events:
        return [self._event(f"response.{name}", response=self._shown()) for name in ("created", "in_progress")]

    def _begun(self, block: Block) -> Events:
        return [
            self._event("response.output_item.added", output_index=block.index, item=_item(block, is_begun=True)),
            *self._part(block, "added"),
        ]

    def _delta(self, block: Block, text: str) -> Events:
        return [self._event(EVENTS[block.kind][0] + ".delta", **self._place(block), delta=text)]

    def _ended(self, block: Block) -> Events:
        name, field = EVENTS[block.kind]
        whole = {field: block.text} | ({"name": block.name} if block.kind == "call" else {})
        return [
            self._event(f"{name}.done", **self._place(block), **whole),
            *self._part(block, "done"),
            self._event("response.output_item.done", output_index=block.index, item=_item(block)),
        ]

    def _last_events(self, error: ApiError | None) -> Events:
        response = self._shown()
        if error is not None:
            response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        return [self._event(f"response.{response['status']}", response=response)]

    def _event(self, type: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **values}

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": _item(block)["id"], "output_index": block.index}
        place |= {} if block.kind == "call" else {"content_index": 0}
        return place | ({"logprobs": []} if block.kind == "content" else {})

    def _part(self, block: Block, end: str) -> Events:
        if block.kind == "call":
            return []
        part = _item(block)["content"][0] | ({"text": ""} if end == "added" else {})
        place = {name: value for name, value in self._place(block).items() if name != "logprobs"}
        return [self._event(f"response.content_part.{end}", **place, part=part)]


def _item(block: Block, *, is_begun: bool = False) -> dict[str, Any]:
    """Returns a block as an item; `is_begun`: before its text."""
    status = {"status": "in_progress" if is_begun else "completed"}
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": "" if is_begun else block.text}
        return {"type": "function_call", "id": f"fc_{block.id}", **call, **status}
    if block.kind == "reasoning":
        content = [] if is_begun else [{"type": "reasoning_text", "text": block.text}]
        return {"type": "reasoning", "id": f"rs_{block.id}", "summary": [], "content": content, **status}
    text: dict[str, Any] = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    content = [] if is_begun else [text]
    return {"type": "message", "id": f"msg_{block.id}", "role": "assistant", "content": content, **status}
