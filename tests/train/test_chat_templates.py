"""A user's chat template is used for training, and saved with the model."""

import json
import re

import pytest

import moe_jax
from moe_jax.cli import main
from moe_jax.train import load_tokenizer
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.data.chat_templates import CHATML, TEMPLATES, with_chat_template
from tests.helpers import steps_without_passes, tiny

CHAT = [
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "bye"},
]
TURNS_OF = {
    "deepseek": ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
    "kimi": ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"],
}
"""The tokens of turns of model families, but those that each tokenizer of these tests has."""
ADD = {"name": "add", "arguments": '{"a": 1}'}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds"}}]
CALLING = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}] * 2},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def family_tokenizer(family, template=None):
    made = tiny.tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": TURNS_OF[family], "bos_token": TURNS_OF[family][0]})
    return made


def test_chatml_marks_answers_and_their_end_tokens():
    """An answer ends with the token that ends generation. The template refuses tools."""
    plain = tiny.tokenizer(None)
    tokenizer = with_chat_template(plain, "chatml")
    tokens, trained = chat_tokens(tokenizer, CHAT)
    assert tokenizer.decode(tokens[trained]) == "hello<|end|>bye<|end|>" and not plain.chat_template
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(tokens).startswith(prompt)
    with pytest.raises(ValueError, match="the chatml template has no tools"):
        chat_tokens(tokenizer, CHAT, [{"name": "add"}])


def test_a_template_file_is_read(tmp_path):
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    assert with_chat_template(tiny.tokenizer(None), str(tmp_path / "own.jinja")).chat_template == tiny.CHATML
    (tmp_path / "own.jinja").write_text("\n")
    with pytest.raises(ValueError, match="own.jinja is empty"):
        with_chat_template(tiny.tokenizer(), str(tmp_path / "own.jinja"))


def test_a_given_template_replaces_the_saved_tokenizers(tmp_path):
    tiny.tokenizer("old").save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "old" / "tokenizer_config.json").read_text())
    (tmp_path / "old" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "new", tokenizer_from=tmp_path / "old", chat_template=CHATML)
    assert load_tokenizer(tmp_path / "old").chat_template == "old"
    assert load_tokenizer(tmp_path / "new").chat_template == CHATML
    assert "chat_template" not in json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())


def test_a_run_and_its_conversion_have_the_template(tmp_path, monkeypatch):
    steps_without_passes.put_in_place(monkeypatch, steps_without_passes.learn_nothing)
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "base")
    tiny.tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    paths = {"--model": tmp_path / "base", "--data": tmp_path / "chats.jsonl", "--output": tmp_path / "run"}
    options = "--seq-len 64 --batch-size 1 --steps 1 --warmup-steps 0 --chat-template chatml --dtype float32".split()
    main(["finetune", *(str(part) for pair in paths.items() for part in pair), *options])
    tokenizer = ["--tokenizer", str(tmp_path / "base")]
    main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", *tokenizer])
    assert all(load_tokenizer(folder).chat_template == CHATML for folder in (tmp_path / "run" / "model", tmp_path / "hf"))


@pytest.mark.parametrize("asked", [False, True], ids=["whole", "prompt"])
def test_deepseek_writes_what_its_own_template_writes(asked):
    own = family_tokenizer("deepseek", tiny.trl_template("deepseekv3"))
    made = with_chat_template(own, "deepseek-r1")
    for length in range(1, len(CALLING) + 1):
        expected = own.apply_chat_template(CALLING[:length], tokenize=False, add_generation_prompt=asked)
        assert made.apply_chat_template(CALLING[:length], tokenize=False, add_generation_prompt=asked) == expected
    # V3 does not begin with reasoning. All else is alike.
    plain = with_chat_template(own, "deepseek-v3").apply_chat_template(CALLING, tokenize=False, add_generation_prompt=asked)
    assert plain == expected.removesuffix("<think>\n")


def test_deepseek_begins_each_round_of_tool_calls_anew():
    """The model's own template writes the beginning of calls and outputs in the first round alone."""
    made = with_chat_template(family_tokenizer("deepseek"), "deepseek-v3")
    one = made.apply_chat_template(CALLING[:5], tokenize=False).partition("1 + 1?")[2]
    two = made.apply_chat_template([*CALLING[:5], *CALLING[2:5]], tokenize=False).partition("1 + 1?")[2]
    assert two == one + one.removeprefix("<｜Assistant｜>")


CALL = '<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
KIMI = (
    "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>1 + 1?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think></think>"
    f"<|tool_calls_section_begin|>{CALL.format(0)}{CALL.format(1)}<|tool_calls_section_end|><|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.add:1\ntwo<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think></think>2.<|im_end|><|im_user|>user<|im_middle|>Sure?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think></think>Yes.<|im_end|>"
)


def test_kimi_writes_what_its_own_template_writes():
    tokenizer = family_tokenizer("kimi")
    thinking, plain = (with_chat_template(tokenizer, name) for name in ("kimi-k2-thinking", "kimi-k2"))
    assert thinking.apply_chat_template(CALLING, tokenize=False) == KIMI
    assert plain.apply_chat_template(CALLING, tokenize=False) == KIMI.replace("<think></think>", "")
    prompt = plain.apply_chat_template(CALLING[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
        "<|im_user|>user<|im_middle|>1 + 1?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    with_tools = plain.apply_chat_template(CALLING, tools=TOOLS, tokenize=False)
    declared = json.dumps(TOOLS)
    assert with_tools == f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>" + KIMI.replace("<think></think>", "")


def test_kimi_keeps_the_ids_of_calls():
    calls = [{"id": name, "type": "function", "function": ADD} for name in ("first", "second")]
    outputs = [{"role": "tool", "content": "2", "tool_call_id": name} for name in ("second", "first")]
    made = with_chat_template(family_tokenizer("kimi"), "kimi-k2")
    text = made.apply_chat_template([CALLING[1], CALLING[2] | {"tool_calls": calls}, *outputs, CALLING[5]], tokenize=False)
    assert "<|tool_call_begin|>first<|tool_call_argument_begin|>" in text
    assert text.index("## Return of second\n2") < text.index("## Return of first\n2")


@pytest.mark.parametrize(
    "name, begin, middle",
    [
        ("deepseek-v3", "<think>\n", "\n</think>\n\n"),
        ("deepseek-r1", "", "\n</think>\n\n"),
        ("kimi-k2", "<think>", "</think>"),
        ("kimi-k2-thinking", "<think>", "</think>"),
    ],
)
@pytest.mark.parametrize("inline", [False, True], ids=["key", "content"])
def test_a_familys_template_learns_all_reasoning(name, begin, middle, inline):
    """R1's prompt ends with <think>, which is then not learned."""
    tokenizer = with_chat_template(family_tokenizer(name.partition("-")[0]), name)
    chat = []
    for number in (1, 2):
        said = {"content": f"<think>r{number}</think>a{number}"} if inline else {"content": f"a{number}"}
        said |= {} if inline else {"reasoning_content": f"r{number}"}
        chat += [{"role": "user", "content": "?"}, {"role": "assistant", **said}]
    end = "<|im_end|>" if "kimi" in name else "<｜end▁of▁sentence｜>"
    assert tiny.learned(tokenizer, chat, TOOLS) == [f"{begin}r{number}{middle}a{number}{end}" for number in (1, 2)]
    prompt = tokenizer.apply_chat_template(chat[:3], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(chat, tools=TOOLS, tokenize=False).startswith(prompt) and "adds" in prompt


def test_a_familys_template_learns_tool_calls():
    for name in sorted(TEMPLATES.keys() - {"chatml"}):
        tokenizer = with_chat_template(family_tokenizer(name.partition("-")[0]), name)
        first, second, last = tiny.learned(tokenizer, CALLING, TOOLS)
        assert first.count('{"a": 1}') == 2 and "2." in second and "Yes." in last
        arguments = {"function": {"name": "add", "arguments": {"a": 1}}}
        as_objects = [m | {"tool_calls": [arguments] * 2} if "tool_calls" in m else m for m in CALLING]
        assert tiny.learned(tokenizer, as_objects, TOOLS) == [first, second, last]


def test_a_familys_template_needs_its_tokens():
    message = "chat_template='kimi-k2' needs a tokenizer with the tokens <|im_assistant|>, <|im_middle|>, "
    with pytest.raises(ValueError, match=re.escape(message)):
        with_chat_template(tiny.tokenizer(), "kimi-k2")
