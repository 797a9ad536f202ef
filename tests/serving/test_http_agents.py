"""Agents' APIs: /v1/responses with OpenAI's client, and /v1/messages in Anthropic's wire format."""

import json

import httpx
import pytest

from tests.helpers import served, tiny
from tests.helpers.fake_engine import FakeEngine

CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Zürich"}}\n</tool_call>'
ANSWER = f"Where?\n</think>\n\nLet me see.\n{CALL}"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}|{{ m.content }}|"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{#<tool_call></think>{{tools}}{{enable_thinking}}#}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def server():
    with served.serve(FakeEngine(tokenizer=tiny.tokenizer(TEMPLATE))) as running:
        yield running


@pytest.fixture(autouse=True)
def answer(server):
    server.engine.says = ANSWER


def prompt(server):
    return server.engine.tokenizer.decode(server.engine.handles[-1].prompt)


def events_of(server, path, body):
    """Returns the events of a stream, each with its name."""
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=30) as stream:
        lines = [line for line in stream.iter_lines() if line]
    names, data = [line.removeprefix("event: ") for line in lines[::2]], [json.loads(line[6:]) for line in lines[1::2]]
    assert names == [each["type"] for each in data]
    return data


RESPONSE_TOOLS = [{"type": "function", "name": "find", "parameters": PARAMETERS, "strict": True}]


def test_a_response_has_items(server):
    found = server.openai().responses.create(
        model="tiny",
        instructions="Be short.",
        input="hi",
        tools=RESPONSE_TOOLS,
        max_output_tokens=200,
        store=False,
        prompt_cache_retention="24h",
        extra_body={"stream_options": {"include_obfuscation": False}},
    )
    thought, message, call = found.output
    assert thought.content[0].text == "Where?" and message.content[0].text == found.output_text == "Let me see."
    assert call.name == "find" and json.loads(call.arguments) == {"city": "Zürich"} and call.call_id
    assert (found.status, found.error, found.store) == ("completed", None, False)
    assert found.usage.output_tokens_details.reasoning_tokens and found.usage.total_tokens > found.usage.output_tokens
    assert prompt(server).startswith("<|im_start|>system\n|Be short.|<|im_end|>\n<|im_start|>user\n|hi|")
    cut = server.openai().responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_streamed_response_is_the_whole_one(server):
    options = dict(model="tiny", input="hi", tools=RESPONSE_TOOLS)
    whole = server.openai().responses.create(**options)
    with server.openai().responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-1].type == "response.completed"
    texts = ["".join(event.delta for event in events if event.type == f"response.{name}.delta") for name in (
        "reasoning_text", "output_text", "function_call_arguments",
    )]  # fmt: skip
    assert texts == ["Where?", "Let me see.", whole.output[2].arguments]
    assert final.output_text == "Let me see." and final.usage == whole.usage


def test_items_become_messages(server):
    first = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    answered = server.openai().responses.create(model="tiny", input=first, tools=RESPONSE_TOOLS)
    output = {"type": "function_call_output", "call_id": answered.output[2].call_id, "output": "sunny"}
    items = [*first, *(item.model_dump(exclude_none=True) for item in answered.output), output]
    server.openai().responses.create(model="tiny", input=items, tools=RESPONSE_TOOLS, reasoning={"effort": "high"})
    assert "<|im_start|>assistant\nWhere?|Let me see.|find{" in prompt(server)
    assert "<|im_start|>tool\n|sunny|" in prompt(server)


MESSAGE_TOOLS = [{"name": "find", "description": "finds", "input_schema": PARAMETERS}]
ASKED = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], "tools": MESSAGE_TOOLS}


def test_a_message_has_blocks(server):
    found = server.post("/v1/messages", json=ASKED | {"system": [{"type": "text", "text": "Be short."}]}).json()
    thought, text, call = found["content"]
    assert thought == {"type": "thinking", "thinking": "Where?", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert call | {"id": 0} == {"type": "tool_use", "id": 0, "name": "find", "input": {"city": "Zürich"}}
    assert (found["role"], found["stop_reason"], found["type"]) == ("assistant", "tool_use", "message")
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == len(server.engine.handles[-1].prompt)
    count = server.post("/v1/messages/count_tokens", json={name: ASKED[name] for name in ("messages", "tools")}).json()
    server.post("/v1/messages", json=ASKED)
    assert count == {"input_tokens": len(server.engine.handles[-1].prompt)}
    assert server.post("/v1/messages", json=ASKED | {"max_tokens": 3}).json()["stop_reason"] == "max_tokens"


def test_a_streamed_message_is_the_whole_one(server):
    whole, events = server.post("/v1/messages", json=ASKED).json(), events_of(server, "/v1/messages", ASKED)
    assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            block, (kind, text) = blocks[event["index"]], event["delta"].values()
            field = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "json"}[kind]
            block[field] = block.get(field, "") + text
    blocks[2]["input"] = json.loads(blocks[2].pop("json"))
    assert [each | {"id": 0} for each in blocks] == [each | {"id": 0} for each in whole["content"]]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1] == {"type": "message_stop"}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_blocks_become_messages(server):
    answered = server.post("/v1/messages", json=ASKED).json()
    result = {
        "type": "tool_result",
        "tool_use_id": answered["content"][2]["id"],
        "content": [{"type": "text", "text": "sunny"}],
    }
    later = [{"role": "assistant", "content": answered["content"]}, {"role": "user", "content": [result]}]
    body = ASKED | {"messages": ASKED["messages"] + later, "thinking": {"type": "disabled"}, "stop_sequences": ["x"]}
    assert server.post("/v1/messages", json=body).status_code == 200
    assert "<|im_start|>assistant\nWhere?|Let me see.|find{" in prompt(server)
    assert "<|im_start|>tool\n|sunny|" in prompt(server) and server.engine.submitted[-1].stop == ("x",)


def test_a_message_may_have_a_form_and_an_effort(server):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "schema": {"enum": ["Where", "Here"]}}
    body = ASKED | {"tools": [], "cache_control": {"type": "ephemeral"}, "output_config": {"format": form, "effort": "low"}}
    assert server.post("/v1/messages", json=body).status_code == 200
    assert server.engine.submitted[-1].grammar is not None
    assert server.post("/v1/messages", json=ASKED).status_code == 200 and server.engine.submitted[-1].grammar is None


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("responses", {"input": "a", "store": True}, "the server keeps no responses: store can only be false"),
        ("responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id can only be null"),
        ("responses", {"input": [{"type": "item_reference"}]}, "items of input can be message, reasoning"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools must be a list of"),
        ("responses", {"input": []}, "input must be a text, or a list of items"),
        ("responses", {"input": "a", "messages": []}, "unknown fields: messages"),
        ("messages", {"messages": []}, "max_tokens must be an integer"),
        ("messages", ASKED | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of a message can be"),
        ("messages", ASKED | {"output_config": {"form": {}}}, "unknown fields of output_config: form"),
        ("messages", ASKED | {"tool_choice": {"type": "all"}}, "tool_choice must be auto, none, required"),
    ],
)
def test_wrong_requests_are_named(server, path, body, message):
    answer = server.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_key_may_come_in_the_header_of_messages():
    with served.serve(api_key="secret") as running:
        for headers, status in (({"x-api-key": "secret"}, 400), ({"x-api-key": "wrong"}, 401), ({}, 401)):
            assert running.post("/v1/messages", json={}, headers=headers).status_code == status


@pytest.mark.parametrize("path, last", [("responses", "response.failed"), ("messages", "error")])
def test_a_stream_that_fails_ends_with_an_event(path, last):
    with served.serve(FakeEngine(tokenizer=tiny.tokenizer(TEMPLATE), step_seconds=0.02)) as running:
        body = {"input": "hi"} if path == "responses" else ASKED
        with httpx.stream("POST", f"{running.url}/v1/{path}", json=body | {"stream": True}, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.engine.fail()
            assert f"event: {last}" in list(lines)
