"""Fields that ask for a form of the text reach the engine as a grammar; nothing is asked of an engine without llguidance."""

import json

import openai
import pydantic
import pytest

from moe_jax.serving import chat, grammar
from tests.helpers import served, tiny
from tests.helpers.fake_engine import FakeEngine
from tests.serving.test_http_tools import MESSAGES, TOOLS, asked

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
THINKS = tiny.CHATML + "{#<tool_call></think>{{tools}}#}{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("llguidance")
    with served.serve(FakeEngine(tokenizer=tiny.tokenizer(THINKS))) as running:
        yield running


def accepts(engine, text):
    """Returns True if the last request's grammar has exactly this text."""
    matcher = engine.grammars.matcher(engine.submitted[-1].grammar)
    for token in engine.tokenizer(text)["input_ids"]:
        if not matcher.bits[token // 32] >> token % 32 & 1:
            return False
        grammar.commit([(matcher, token)])
    return matcher.is_complete


@pytest.mark.parametrize(
    "field, fits, fits_not",
    [
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"a": "x"}'),
        ({"structured_outputs": {"regex": "[ab]+"}}, "ab", "abc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "ye"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a", "c"),
        ({"structured_outputs": {"json_object": True}}, '{"x": []}', "[]"),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}', "1"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"a":1}', "{"),
    ],
)
def test_completions_have_the_form_that_a_field_names(server, field, fits, fits_not):
    answer = server.post("/v1/completions", json={"prompt": "a", "n": 2} | field)
    assert answer.status_code == 200, answer.text
    assert accepts(server.engine, fits) and not accepts(server.engine, fits_not)


def test_answers_have_their_form_after_the_thought(server):
    server.engine.says = 'Hm.</think>\n\n{"a": 1}'
    options = dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}})
    message, *_ = asked(server.openai(), **options)
    assert (message["reasoning"], json.loads(message["content"])) == ("Hm.", {"a": 1})
    assert accepts(server.engine, server.engine.says) and not accepts(server.engine, '{"a": 1}')
    # Agents send tools too: the answer may be a call instead.
    asked(server.openai(), tools=TOOLS, **options)
    assert accepts(server.engine, 'Hm.</think>{"a": 1}')
    assert accepts(server.engine, 'Hm.</think><tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_its_schema_after_the_thought(server, stream):
    call = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.engine.says = "Hm.</think>\n\n" + call
    message, reason, _ = asked(server.openai(), stream, tools=TOOLS, tool_choice="required")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"} and reason == "tool_calls"
    assert message["reasoning"] == "Hm."
    two = f"Hm.</think>{call}\n{call}"
    assert accepts(server.engine, two) and not accepts(server.engine, "Hm.</think>" + call.replace('"Bern"', "7"))
    asked(server.openai(), stream, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert accepts(server.engine, server.engine.says) and not accepts(server.engine, two)


class Place(pydantic.BaseModel):
    """A class that OpenAI's client reads from an answer or from a call."""

    city: str


def test_openais_client_reads_classes(server):
    chats, options = server.openai().chat.completions, dict(model="tiny", messages=MESSAGES)
    server.engine.says = 'Hm.</think>{"city": "Bern"}'
    found = [chats.parse(response_format=Place, **options)]
    with chats.stream(response_format=Place, **options) as stream:
        assert "content.delta" in [event.type for event in stream]
        found.append(stream.get_final_completion())
    assert [each.choices[0].message.parsed for each in found] == [Place(city="Bern")] * 2
    server.engine.says = 'Hm.</think><tool_call>\n{"name": "Place", "arguments": {"city": "Bern"}}\n</tool_call>'
    parsed = chats.parse(tools=[openai.pydantic_function_tool(Place)], tool_choice="required", **options)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Place(city="Bern")


def test_wrong_schemas_name_their_place(server):
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "objekt"}]}}}
    body = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "the JSON schema cannot be compiled at properties.a.anyOf.0: Invalid type: objekt" in answer.text


def test_without_the_package_grammars_are_refused(monkeypatch):
    for module in (chat, grammar):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with served.serve(FakeEngine(tokenizer=tiny.tokenizer(THINKS))) as running:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
            answer = running.post(f"/v1/{path}", json=body | {"response_format": {"type": "json_object"}})
            assert answer.status_code == 400 and "pip install 'moe_jax[grammar]'" in answer.text
        running.engine.says = '\n{"name": "find"}\n</tool_call>'
        message, *_ = asked(running.openai(), tools=TOOLS, tool_choice="required")
        assert message["tool_calls"][0]["function"]["name"] == "find"
        assert running.engine.tokenizer.decode(running.engine.handles[-1].prompt).endswith("</think>\n\n<tool_call>")
