"""Tool calls, thoughts and the beginnings of answers, as OpenAI's client gets them whole and streamed."""

import json

import pytest

from moe_jax.serving import chat
from tests.helpers import served, tiny
from tests.helpers.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"properties": {"city": {"type": "string"}}}}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Zürich"}}\n</tool_call>'
ANSWER = f"<think>\nWhere?\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
TEMPLATE = tiny.CHATML + "{#<tool_call></think>{{tools}}{{enable_thinking}}#}"


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(tokenizer=tiny.tokenizer(TEMPLATE))


@pytest.fixture(scope="module")
def client(engine):
    with served.serve(engine) as running:
        yield running.openai()


def asked(client, stream=False, **options):
    """Returns the message, the reason of its end and the usage of an answer; with `stream` put together from its chunks."""
    options = dict(model="tiny", messages=MESSAGES) | options
    if not stream:
        found = client.chat.completions.create(**options)
        return found.choices[0].message.model_dump(exclude_none=True), found.choices[0].finish_reason, found.usage
    message: dict = {"role": "assistant", "content": ""}
    calls: dict[int, dict] = {}
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            delta, reason = choice.delta.model_dump(exclude_none=True), choice.finish_reason
            for call in delta.pop("tool_calls", ()):
                assert calls.setdefault(call.pop("index"), call) is call
            delta.pop("role", None)
            message |= {name: message.get(name, "") + text for name, text in delta.items()}
    message |= {"tool_calls": [calls[i] for i in range(len(calls))]} if calls else {}
    return message, reason, chunk.usage


@pytest.mark.parametrize("stream", [False, True])
def test_thought_text_and_calls_are_apart(engine, client, stream):
    engine.says = ANSWER
    message, reason, usage = asked(client, stream, tools=TOOLS)
    assert message["content"] == "Let me see." and message["reasoning_content"] == message["reasoning"] == "Where?"
    assert reason == "tool_calls" and len({call["id"] for call in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] == "find"
        assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    assert usage.completion_tokens_details.reasoning_tokens == len("\nWhere?\n</think>")
    message, *_ = asked(client, stream, tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1
    message, reason, _ = asked(client, stream, tools=TOOLS, tool_choice="none")
    assert message["content"] == f"Let me see.\n{CALL}\n{CALL}" and "tool_calls" not in message and reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_off_call_is_text(engine, client, stream):
    engine.says = CALL
    message, reason, _ = asked(client, stream, tools=TOOLS, max_tokens=20)
    assert (message["content"], reason) == (CALL[:20], "length")
    message, *_ = asked(client, stream, tools=TOOLS)
    assert not message.get("content") and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens(stream):
    tokenizer = tiny.tokenizer(TEMPLATE)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    engine = FakeEngine(tokenizer=tokenizer)
    engine.says = ANSWER
    with served.serve(engine) as running:
        message, *_ = asked(running.openai(), stream, tools=TOOLS)
        assert len(message["tool_calls"]) == 2
        message, *_ = asked(running.openai(), stream)
        assert "<tool_call>" not in message["content"]
        message, *_ = asked(running.openai(), stream, extra_body={"skip_special_tokens": False})
        assert "<tool_call>" in message["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_channels_of_gpt_oss(stream):
    tokenizer = tiny.tokenizer(tiny.CHATML + "{#<|channel|>analysis<|message|><|channel|>commentary{{tools}}#}")
    tokenizer.add_tokens(["<|channel|>", "<|message|>", "<|start|>"], special_tokens=True)
    engine = FakeEngine(tokenizer=tokenizer)
    thought = "<|channel|>analysis<|message|>Where?<|start|>assistant"
    engine.says = thought + '<|channel|>commentary to=functions.find json<|message|>{"city": "Bern"}'
    with served.serve(engine) as running:
        message, reason, _ = asked(running.openai(), stream, tools=TOOLS)
        assert (message["reasoning"], reason) == ("Where?", "tool_calls")
        assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"city": "Bern"}'}
        engine.says = thought + "<|channel|>final<|message|>There."
        message, reason, usage = asked(running.openai(), stream)
        assert (message["content"], reason) == ("There.", "stop") and usage.completion_tokens_details.reasoning_tokens > 0
        engine.says = 'find json<|message|>{"city": "Bern"}'
        message, *_ = asked(running.openai(), stream, tools=TOOLS, tool_choice="required")
        assert message["tool_calls"][0]["function"]["name"] == "find"
    assert tokenizer.decode(engine.handles[-1].prompt).endswith("<|channel|>commentary to=functions.")


def test_calls_are_forced_by_the_beginning_of_the_answer(engine, client, monkeypatch):
    monkeypatch.setattr(chat, "is_installed", lambda: False)
    engine.says = ' {"city": "Bern"}}\n</tool_call>'
    choice = {"type": "function", "function": {"name": "find"}}
    message, reason, _ = asked(client, tools=TOOLS, tool_choice=choice)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}' and reason == "tool_calls"
    end = '<|im_start|>assistant\n<tool_call>\n{"name": "find", "arguments":'
    assert engine.tokenizer.decode(engine.handles[-1].prompt).endswith(end)
    engine.says = '\n{"name": "find"}\n</tool_call>'
    message, *_ = asked(client, tools=TOOLS, tool_choice="required")
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_client_begins(engine, client, stream):
    engine.says = " sky.</think>Blue."
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>The"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    message, *_ = asked(client, stream, messages=messages, extra_body=extra)
    assert (message["reasoning"], message["content"]) == ("sky.", "Blue.")
    assert engine.tokenizer.decode(engine.handles[-1].prompt).endswith("<|im_start|>assistant\n<think>The")


def test_reasoning_effort_reaches_the_template():
    template = tiny.CHATML + "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
    engine = FakeEngine(tokenizer=tiny.tokenizer(template))
    engine.says = "a</think>b"
    with served.serve(engine) as running:
        assert asked(running.openai(), reasoning_effort="high")[0]["reasoning"] == "a"
        message, _, usage = asked(running.openai(), reasoning_effort="none")
        assert "reasoning" not in message and usage.completion_tokens_details.reasoning_tokens == 0


def test_without_a_template_nothing_can_be_asked_of_it():
    with served.serve(FakeEngine(tokenizer=tiny.tokenizer(None))) as running:
        for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"reasoning_effort": "low"}, {}):
            answer = running.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
            assert answer.status_code == 400 and "template" in answer.text or "format of calls is unknown" in answer.text
