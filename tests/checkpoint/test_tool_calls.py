"""Tool calls have one text in each form that data and clients give them, under every template that writes calls."""

from pathlib import Path

import pytest

from moe_jax.checkpoint.messages import as_template_wants
from moe_jax.generation.text import chat_prompts
from moe_jax.train.data.chat import chat_tokens
from tests.helpers import tiny

AROUND = (
    "{%% for m in messages %%}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{%% for c in m['tool_calls'] %%}%s{%% endfor %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
ITEMS = '"{{ k }}": {{ v | tojson }}{{ ", " if not loop.last }}{% endfor %}}'
WRITERS = {
    "JSON": "{{ c.function.arguments | tojson }}",
    "JSON of the call": '{{ (c.function | tojson).removeprefix(\'{"name": "add", "arguments": \')[:-1] }}',
    "joined": "{{ '' + c['function']['arguments'] }}",
    "printed": "{{ c.function.arguments }}",
    "both": "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
    "items": '{{ "{" }}{% for k, v in c.function.arguments | items %}' + ITEMS,
    "items of a variable": '{% set a = c.function.arguments %}{{ "{" }}{% for k, v in a.items() %}' + ITEMS,
}
OBJECT, STRING = {"a": 1, "b": True, "c": None}, '{"a": 1, "b": true, "c": null}'


def chat(arguments, content=None):
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [OBJECT, STRING], ids=["object", "string"])
@pytest.mark.parametrize("how", WRITERS)
def test_arguments_are_json_in_what_is_learned_and_in_prompts(how, arguments):
    tokenizer = tiny.tokenizer(AROUND % WRITERS[how])
    tokens, learned = chat_tokens(tokenizer, chat(arguments))
    assert tokenizer.decode(tokens[learned]) == STRING + "<|im_end|>"
    (prompt,) = chat_prompts(tokenizer, [[*chat(arguments), {"role": "tool", "content": "1"}]])
    assert tokenizer.decode(prompt).count(STRING) == 1


def test_strings_are_kept_where_the_template_takes_both():
    tokenizer = tiny.tokenizer(AROUND % WRITERS["both"])
    tokens, learned = chat_tokens(tokenizer, chat('{"a":1}'))
    assert tokenizer.decode(tokens[learned]) == '{"a":1}<|im_end|>'


def test_real_templates_write_both_forms_alike():
    """All templates in TRL's folder that know calls, but for its copies with marks. DeepSeek-R1's may refuse calls."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer, found = tiny.tokenizer(), []
    for file in sorted(folder.glob("*.jinja")):
        tokenizer.chat_template = file.read_text()
        if "tool_calls" not in tokenizer.chat_template or file.stem.endswith("_training"):
            continue
        for content in (None, "", "I see."):
            tool = {"role": "tool", "content": "1", "name": "add", "tool_call_id": "call00001"}
            texts = [_prompt(tokenizer, [*chat(arguments, content), tool]) for arguments in ({"a": "Oslo"}, '{"a": "Oslo"}')]
            assert texts[0] == texts[1], (file.name, content)
            assert "Oslo" in texts[0] or "r1_distill" in file.name, (file.name, content, texts[0])
            found.append(texts[0])
    assert len(found) > 60


def test_a_call_that_the_template_leaves_out_is_named():
    """DeepSeek-R1's template writes calls of messages without content alone, and no content may be null or empty."""
    template = AROUND.replace("m['tool_calls']", "m['tool_calls'] if m['content'] == ''") % WRITERS["joined"]
    tokenizer = tiny.tokenizer(template)
    for content in (None, ""):
        tokens, _ = chat_tokens(tokenizer, chat(OBJECT, content))
        assert STRING in tokenizer.decode(tokens)
    with pytest.raises(ValueError, match="the chat template would leave out the tool_calls of message 1 next to its content"):
        chat_tokens(tokenizer, chat(OBJECT, "Let me see."))


def test_a_message_without_content_is_one_whose_content_is_null():
    """Templates before transformers 5.24 see the null, and DeepSeek-V3's first one writes the calls of such messages alone."""
    tokenizer, null = tiny.tokenizer(AROUND % WRITERS["joined"]), chat(OBJECT)
    without = [null[0], {key: value for key, value in null[1].items() if key != "content"}]
    assert as_template_wants(tokenizer, without, None) == as_template_wants(tokenizer, null, None)


def test_a_call_without_arguments_may_have_an_empty_string():
    tokenizer = tiny.tokenizer(AROUND % WRITERS["JSON"])
    tokens, learned = chat_tokens(tokenizer, chat(""))
    assert tokenizer.decode(tokens[learned]) == "{}<|im_end|>"


def test_a_string_that_is_no_json_is_named():
    with pytest.raises(ValueError, match="message 1 calls a tool with \"arguments\" that are no JSON: '{a'"):
        chat_tokens(tiny.tokenizer(AROUND % WRITERS["JSON"]), chat("{a"))


@pytest.mark.parametrize(
    "tool",
    [{"name": "add"}, {"type": "function", "name": "add"}, {"function": {"name": "add"}}, {"type": None, "name": "add"}],
)
def test_tools_have_the_form_of_openai(tool):
    tokenizer = tiny.tokenizer("{{ tools | tojson }}" + tiny.CHATML)
    tokens, _ = chat_tokens(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1"}], [tool])
    assert '[{"type": "function", "function": {"name": "add"}}]<' in tokenizer.decode(tokens)


def test_tools_stay_bare_for_a_template_that_reads_them_so():
    tokenizer = tiny.tokenizer("{% for tool in tools or [] %}{{ tool.name }}, {% endfor %}" + tiny.CHATML)
    (prompt,) = chat_prompts(tokenizer, ["?"], [{"name": "add"}, {"name": "subtract"}])
    assert tokenizer.decode(prompt).startswith("add, subtract, <")


def _prompt(tokenizer, messages):
    try:
        return tokenizer.decode(chat_prompts(tokenizer, [messages])[0])
    except ValueError as error:
        return str(error)
