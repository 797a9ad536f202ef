"""Text goes in and comes out, with the tokenizer, the ends and the sampling defaults in a model's folder."""

import json

import numpy as np
import pytest
from tokenizers import processors

import moe_jax
from moe_jax.generation.text import chat_prompts, completion_tokens, text_options
from tests.helpers import tiny

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("text")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), made / "model", tokenizer_from=made / "tokenizer")
    return made / "model"


@pytest.fixture(scope="module")
def model(folder):
    return moe_jax.from_pretrained(folder, dtype="float32")


def decoded(model, tokens: list[int], ends: list[int]) -> str:
    new = moe_jax.generate(model, tokens, max_new_tokens=TOKENS, eos_token_id=ends)
    return tiny.tokenizer().decode(new, skip_special_tokens=True)


def test_complete_adds_to_a_text_and_to_several(model):
    expected = decoded(model, tiny.tokenizer()("ab")["input_ids"], [0])
    assert moe_jax.complete(model, "ab", max_new_tokens=TOKENS) == expected
    first, other = moe_jax.complete(model, ["ab", "c"], max_new_tokens=TOKENS)
    assert first == expected and other == moe_jax.complete(model, "c", max_new_tokens=TOKENS)


def test_a_prompt_gets_no_end_token(model):
    ending = tiny.tokenizer()
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    assert ending("ab")["input_ids"][-1] == 2
    assert moe_jax.complete(model, "ab", tokenizer=ending, max_new_tokens=TOKENS) == moe_jax.complete(
        model, "ab", max_new_tokens=TOKENS
    )


def test_a_generation_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json must hold a JSON object; mend or remove it"):
        text_options(tmp_path, tiny.dense().config, tiny.tokenizer(), {})


def test_a_model_may_be_named_by_its_folder(model, folder, monkeypatch):
    monkeypatch.setattr("moe_jax.generation.text.from_pretrained", lambda path, mtp: model if path == folder else None)
    assert moe_jax.complete(folder, "ab", max_new_tokens=TOKENS) == moe_jax.complete(model, "ab", max_new_tokens=TOKENS)


def test_a_model_without_a_folder_needs_a_tokenizer(model):
    alone = tiny.dense()
    with pytest.raises(ValueError, match="this model was not read from a folder.*: pass tokenizer=moe_jax.load_tokenizer"):
        moe_jax.complete(alone, "ab")
    assert moe_jax.complete(alone, "ab", tokenizer=tiny.tokenizer(), max_new_tokens=TOKENS) == moe_jax.complete(
        model, "ab", max_new_tokens=TOKENS
    )


def test_chat_answers_a_text_a_conversation_and_several(model):
    tokenizer, messages = tiny.tokenizer(), [{"role": "user", "content": "ab"}]
    tokens = tokenizer("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    expected = decoded(model, tokens, [0, 2])
    options = dict(max_new_tokens=TOKENS)
    assert moe_jax.chat(model, "ab", **options) == moe_jax.chat(model, messages, **options) == expected
    assert moe_jax.chat(model, [messages, "ab"], **options) == [expected] * 2


def test_the_template_sees_tools_and_its_options(model, monkeypatch):
    prompts = []
    monkeypatch.setattr("moe_jax.generation.text.generate", lambda model, tokens, **_: prompts.extend(tokens) or [[]])
    tokenizer = tiny.tokenizer("{{ tools[0]['type'] }}{{ tools[0]['function']['name'] }}{{ mood }}")
    for tool in {"name": "clock"}, {"type": "function", "name": "clock"}, {"function": {"name": "clock"}}:
        moe_jax.chat(model, "ab", tokenizer=tokenizer, tools=[tool], template_options={"mood": "calm"})
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["functionclockcalm"] * 3


def test_a_prompt_has_one_beginning():
    tokenizer = tiny.tokenizer_with_a_beginning()
    bare, written = completion_tokens(tokenizer, ["ab", "<|im_start|>ab"])
    assert bare == written and written.count(1) == 1


def test_an_answer_without_content_is_empty():
    """Null keys, as clients send back what they got, count as absent."""
    tokenizer = tiny.tokenizer("{% for m in messages %}{{ m.keys() | list }}{{ m.content }};{% endfor %}")
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    (tokens,) = chat_prompts(tokenizer, [[answer, {"role": "user", "content": "ab"}]])
    assert tokenizer.decode(tokens) == "['role', 'content'];['role', 'content']ab;"


@pytest.mark.parametrize(
    "beside, given, expected",
    [
        ({}, {}, (0.0, None, None)),
        ({"temperature": 0.6, "top_k": 20}, {}, (0.0, None, None)),
        ({"do_sample": True}, {}, (1.0, None, None)),
        ({"do_sample": True, "temperature": None, "top_p": None}, {}, (1.0, None, None)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}, (0.6, 20, 0.95)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0}, {"top_p": 0.5}, (0.6, None, 0.5)),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0}, (0.0, None, None)),
    ],
)
def test_sampling_defaults_are_those_of_the_model(tmp_path, beside, given, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    options = dict.fromkeys(("temperature", "top_k", "top_p")) | given
    filled = text_options(tmp_path, tiny.dense().config, tiny.tokenizer(), options)
    assert (filled["temperature"], filled["top_k"], filled["top_p"]) == expected


@pytest.mark.parametrize(
    "beside, expected",
    [
        ({}, (1.0, None, None)),
        ({"temperature": 0.6, "top_k": 20}, (0.6, 20, None)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (0.0, None, None)),
        ({"do_sample": True, "top_k": -1, "top_p": 0.5}, (1.0, None, 0.5)),
    ],
)
def test_tokens_may_be_drawn_where_the_model_does_not_choose(tmp_path, beside, expected):
    """A server's clients expect OpenAI's temperature of 1, and several different texts."""
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    options = dict.fromkeys(("temperature", "top_k", "top_p"))
    filled = text_options(tmp_path, tiny.dense().config, tiny.tokenizer(), options, draws=True)
    assert (filled["temperature"], filled["top_k"], filled["top_p"]) == expected


def test_settings_that_are_not_applied_are_named_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("moe_jax.generation.text._warned_of", set())
    neutral = {"typical_p": 1.0, "num_beams": 1, "bad_words_ids": [], "max_new_tokens": 7, "top_p": 0.5}
    settings = {"repetition_penalty": 1.05, "min_p": 0.1, "no_repeat_ngram_size": 3, "forced_eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(neutral | settings))
    for options in (["temperature"], ["temperature"], ["min_p", "repetition_penalty"]):
        text_options(tmp_path, tiny.dense().config, tiny.tokenizer(), dict.fromkeys(options))
    end = "no_repeat_ngram_size=3, forced_eos_token_id=0, which change tokens and are not applied here"
    first = f"generation_config.json has repetition_penalty=1.05, min_p=0.1, {end}"
    assert caplog.messages == [first, f"generation_config.json has {end}"]


@pytest.mark.parametrize(
    "beside, answers, ends",
    [({}, False, [0]), ({"eos_token_id": 5}, False, [5]), ({"eos_token_id": [6, 5]}, True, [2, 5, 6])],
    ids=["tokenizer", "generation_config", "answer"],
)
def test_answers_also_end_as_their_template_does(tmp_path, beside, answers, ends):
    """Texts end at the eos token of generation_config.json, else at the tokenizer's."""
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    assert text_options(tmp_path, tiny.dense().config, tiny.tokenizer(), {}, answers=answers)["eos_token_id"] == ends


@pytest.mark.parametrize(
    "call, argument, message",
    [
        (moe_jax.complete, "", "prompt 0 is empty"),
        (moe_jax.complete, [], "prompts must hold at least one text"),
        (moe_jax.complete, [[1, 2]], r"prompts must be a text or a list of texts; got \[1, 2\]; messages go into moe_jax.chat"),
        (moe_jax.chat, [], "messages must hold at least one message"),
        (moe_jax.chat, [["a"]], r'"messages" must be a list of {"role": ..., "content": ...}; got \[\'a\'\]'),
        (moe_jax.chat, {"role": "user", "content": "a"}, "messages must be a text, a list of messages, or a list of either"),
        (moe_jax.chat, [{"role": "user"}], r'message 0 \(user\) needs a string "content"'),
        (
            moe_jax.chat,
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            r'message 0 \(user\) has "content" in parts',
        ),
        (moe_jax.chat, [{"role": "human", "content": "a"}], "message 0 has the role 'human'; roles are system"),
        (moe_jax.complete, None, "prompts must be a text or a list of texts; got None"),
        (moe_jax.chat, [{"role": "assistant", "content": "a"}], "ends with the assistant's message"),
        (moe_jax.chat, "ok \udcff", r"message 0 \(user\) is not valid Unicode: it has half of a surrogate pair, \\udcff"),
        (moe_jax.complete, ["ok", "ok \ud83d"], r"prompt 1 is not valid Unicode: .*, \\ud83d"),
    ],
)
def test_bad_texts_are_named(model, call, argument, message):
    with pytest.raises(ValueError, match=message):
        call(model, argument)


def test_a_tokenizer_and_its_template_must_fit(model):
    with pytest.raises(ValueError, match="tokenizer must be one that moe_jax.load_tokenizer returns; got 'folder'"):
        moe_jax.complete(model, "ab", tokenizer="folder")
    with pytest.raises(ValueError, match="the chat template would leave out tools: it never mentions them"):
        moe_jax.chat(model, "ab", tools=[{"name": "clock"}])


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "max_length", "messages", "return_tensors"])
def test_options_of_our_own_are_no_template_options(model, name):
    with pytest.raises(ValueError, match=f"template_options are values for the chat template; {name} cannot be among them"):
        moe_jax.chat(model, "ab", template_options={name: 1})


def test_a_missing_template_and_one_that_refuses_are_named(model):
    with pytest.raises(ValueError, match="a chat needs a tokenizer with a chat template, and this one has none"):
        moe_jax.chat(model, "ab", tokenizer=tiny.tokenizer(None))
    refusing = tiny.tokenizer("{{ raise_exception('no users') }}")
    with pytest.raises(ValueError, match="the tokenizer's chat template refuses the conversation: no users"):
        moe_jax.chat(model, "ab", tokenizer=refusing)


def test_what_is_refused_is_refused_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr("moe_jax.generation.text.from_pretrained", None)
    with pytest.raises(ValueError, match="top_k must be an integer, at least 1"):
        moe_jax.complete(folder, "ab", top_k=0)
    with pytest.raises(ValueError, match="max_new_tokens=1000000000000: the cache of .* tokens"):
        moe_jax.chat(folder, "ab", max_new_tokens=10**12)
    with pytest.raises(ValueError, match="model_or_path must be a model of moe_jax, a folder or a hub id; got a ndarray"):
        moe_jax.complete(np.ones(1), "ab")
