"""Arguments of tool calls in OpenAI's string of JSON are written once, not as JSON of a string."""

import pytest
import tiny

from moe_jax.checkpoint.tool_calls import as_template_wants
from moe_jax.generation.text import chat_prompts
from moe_jax.train.data.chat import chat_tokens

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_strings_are_objects_for_templates_that_write_json(arguments):
    tokenizer = tiny.tokenizer(TEMPLATE)
    tokens, learned = chat_tokens(tokenizer, chat(arguments))
    assert tokenizer.decode(tokens[learned]) == '{"a": 1}<|im_end|>'


def test_a_prompt_has_the_text_that_was_learned():
    tokenizer = tiny.tokenizer(TEMPLATE)
    messages = [*chat('{"a": 1}'), {"role": "tool", "content": "1"}]
    assert tokenizer.decode(chat_prompts(tokenizer, [messages])[0]).count('{"a": 1}') == 1


@pytest.mark.parametrize("how", ["{% for k, v in c.arguments|items %}{{ k }}", "{% for k, v in c['arguments'].items() %}"])
def test_templates_that_read_items_get_objects(how):
    assert as_template_wants(how, chat('{"a": 1}')) == chat({"a": 1})


@pytest.mark.parametrize(
    "how", ["{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments|tojson }}", "{{ c }}"]
)
def test_templates_that_take_strings_get_them(how):
    assert as_template_wants(how, chat('{"a": 1}')) == chat('{"a": 1}')


def test_a_string_that_is_no_json_is_named():
    with pytest.raises(ValueError, match="message 1 calls a tool with \"arguments\" that are no JSON: '{a'"):
        chat_tokens(tiny.tokenizer(TEMPLATE), chat("{a"))
