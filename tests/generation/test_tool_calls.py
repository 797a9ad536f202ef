"""An answer's thought, text and calls are the same in one piece and cut at every character, and nothing is lost."""

import sys

import pytest

from moe_jax.generation.tool_calls import (
    FORMATS,
    THINK,
    AnswerParts,
    Call,
    HarmonyParts,
    calls_in,
    format_of,
    schemas_of,
)
from tests.helpers import tiny

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": "7", "days": 3, "where": {"a": [1, "é"]}}
UNCLOSED = "<function=find><parameter=city>a</parameter><parameter=days>3</function>"
UNCLOSED_GLM = "find\n<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>days</arg_key>"
FIND, NOW = Call("find", ARGUMENTS), Call("now", {})
JSON = '{"city": "7", "days": 3, "where": {"a": [1, "é"]}}'
ANSWERS = {
    "hermes": (
        f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=find>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=where>\n{"a": [1, "é"]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>where</arg_key>\n<arg_value>{"a": [1, "é"]}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>'
    ),
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}<|call|>"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    ),
}


def parts(pieces, name="hermes", thinks=False, answer=None):
    """Returns the thought, the text and the calls of an answer."""
    answer = AnswerParts(thinks, FORMATS[name], schemas_of(TOOLS)) if answer is None else answer()
    found = [part for i, piece in enumerate(pieces) for part in answer.add(piece, ends=i + 1 == len(pieces))]
    reasoning, content = ("".join(part.text for part in found if part.kind == kind) for kind in ("reasoning", "content"))
    return reasoning, content, [part.call for part in found if part.kind == "call"]


def same_however_cut(text, **options):
    """Returns the parts of a text, which are the same in two pieces cut at any place, and in single characters."""
    whole = parts([text], **options)
    assert all(parts([text[:cut], text[cut:]], **options) == whole for cut in range(len(text)))
    assert parts([*text], **options) == whole
    return whole


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_each_format(name):
    text = f"<think>\nShall I?\n</think>\n\nLet me < see.\n\n{ANSWERS[name]}"
    reasoning, content, calls = same_however_cut(text, name=name)
    assert (reasoning, content) == ("Shall I?", "Let me < see.")
    assert [call[:2] for call in calls] == [FIND[:2], NOW[:2]]
    assert [call.id for call in calls] == (["functions.find:0", "functions.now:1"] if name == "kimi_k2" else [None] * 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_stays_text(name):
    format = FORMATS[name]
    for block in ("", "{", "[1]", '{"name": 7}', "<function=find>", "find\n<arg_key>", UNCLOSED, UNCLOSED_GLM):
        for text in (f"a {format.begin}{block}{format.end} b", f"a\n{format.begin}{block}"):
            assert same_however_cut(text, name=name) == ("", text, [])
    half = ANSWERS[name][: len(format.begin) + 20]
    assert same_however_cut(half, name=name) == ("", half, [])


def test_arguments_can_be_written_as_json_again():
    written = '{"a": 1e999, "b": [-1e999], "c": "\\ud83d", "d": "\\ud83d\\ude00", "e": 0.5}'
    (call,) = FORMATS["hermes"].read(f'{{"name": "f", "arguments": {written}}}', {})
    most = sys.float_info.max
    assert call.arguments == {"a": most, "b": [-most], "c": "?", "d": "😀", "e": 0.5}
    for constant in "NaN", "Infinity", "-Infinity":
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {constant}}}}}</tool_call>'
        assert same_however_cut(text, name="hermes") == ("", text, [])


def test_calls_within_a_thought_are_thoughts():
    text = f"hm {ANSWERS['hermes']}</think>No."
    assert same_however_cut(text, thinks=True) == (f"hm {ANSWERS['hermes']}", "No.", [])
    assert same_however_cut("cut off in a thought </thin", thinks=True) == ("cut off in a thought </thin", "", [])


def test_only_the_beginning_is_a_thought():
    for text in ("Use <think>a</think> so.", "b</think>"):
        assert same_however_cut(text) == ("", text, [])
    assert same_however_cut("\n<think>a</think>b <think>c</think>") == ("a", "b <think>c</think>", [])


def test_a_string_that_may_be_null_is_no_number():
    schema = {"f": {"properties": {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "integer"}]}}}}
    written = "".join(f"<parameter={name}>{value}</parameter>" for name, value in (("a", "7"), ("b", "7"), ("c", "7")))
    (call,) = FORMATS["qwen3_coder"].read(f"<function=f>{written}</function>", schema)
    assert call.arguments == {"a": "7", "b": 7, "c": "7"}
    (call,) = FORMATS["qwen3_coder"].read("<function=f><parameter=a>null</parameter></function>", schema)
    assert call.arguments == {"a": None}


def test_thoughts_stay_where_the_template_has_none():
    answer = AnswerParts(None, None)
    assert [part.text for part in answer.add(f"{THINK}a</think> b ", ends=True)] == [f"{THINK}a</think> b", " "]


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_beginning_makes_the_call(name):
    format = FORMATS[name]
    text = format.begin + format.forced.format(name='"now"' if name == "hermes" else "now")
    tails = {"hermes": " {}}\n", "qwen3_coder": "</function>\n", "deepseek_v3": "{}\n```<｜tool▁call▁end｜>"}
    tails |= {"glm": "", "deepseek_v3.1": "{}<｜tool▁call▁end｜>", "kimi_k2": "{}<|tool_call_end|>", "harmony": "{}"}
    assert [call.name for call in parts([text, tails[name] + format.end], name=name)[2]] == ["now"]


@pytest.mark.parametrize(
    "template, name",
    [
        ("qwen3", "hermes"),
        ("glm4moe", "glm"),
        ("qwen3_6", "qwen3_coder"),
        ("deepseekv3", "deepseek_v3"),
        ("gptoss", "harmony"),
    ],
)
def test_formats_of_templates(template, name):
    assert format_of(tiny.trl_template(template)) == name
    assert format_of("{{ messages }}") is None


THOUGHT, ASSISTANT = "<|channel|>analysis<|message|>Shall I?<|end|>", "<|start|>assistant"
ASKED = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    "text, found",
    [
        (f"{THOUGHT}{ASSISTANT}<|channel|>final<|message|> It is < 3.", ("Shall I?", " It is < 3.", [])),
        (f"{THOUGHT}{ASSISTANT}{ASKED}{JSON}<|call|>", ("Shall I?", "", [FIND])),
        (f"{THOUGHT}{ASSISTANT} to=functions.find<|channel|>commentary json<|message|>{JSON}", ("Shall I?", "", [FIND])),
        (f"<|channel|>commentary<|message|>I look.<|end|>{ASSISTANT}{ASKED}{JSON}<|call|>", ("", "I look.", [FIND])),
        (f"{THOUGHT}{ASSISTANT}{ASKED}{JSON[:9]}", ("Shall I?", ASSISTANT + ASKED + JSON[:9], [])),
        ("<|channel|>analysis<|message|>Cut o", ("Cut o", "", [])),
        ("<|channel|>ana", ("", "", [])),
    ],
)
def test_messages_of_channels(text, found):
    assert same_however_cut(text, answer=lambda: HarmonyParts(FORMATS["harmony"], schemas_of(TOOLS))) == found


def test_messages_without_tools_and_continued_ones():
    call = f"{ASKED}{JSON}<|call|>"
    assert same_however_cut(call, answer=lambda: HarmonyParts(None)) == ("", JSON, [])
    continued = f"lue.<|end|>{ASSISTANT}{THOUGHT}"
    assert same_however_cut(continued, answer=lambda: HarmonyParts(None, in_text=True)) == ("Shall I?", "lue.", [])


def test_calls_of_a_whole_answer_in_channels():
    text = f"{THOUGHT}{ASSISTANT}<|channel|>commentary<|message|>I look.<|end|>{ASSISTANT}{ASKED}{JSON}<|call|>"
    assert calls_in(text, FORMATS["harmony"], schemas_of(TOOLS)) == [FIND]
