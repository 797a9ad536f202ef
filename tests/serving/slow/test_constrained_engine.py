"""Sequences with constraints keep to them, and others of the same steps have the tokens that they have alone."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.serving import grammar
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny

LIMITS = EngineLimits(max_sequences=4, max_tokens_per_step=128, max_chunks_per_step=4, max_length=192, num_pages=16)
PLAIN = SamplingOptions(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=1)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "open": {"type": "boolean"}},
    "required": ["city", "open"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    config = moe_jax.Qwen3Config(**tiny.QWEN3 | {"num_hidden_layers": 1})
    model = moe_jax.from_config(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    engine = Engine(model, limits=LIMITS, tokenizer=tiny.tokenizer(), lazy=True)
    yield engine
    assert engine.stats().owned_pages == 0
    engine.close()


def test_options_constrain_their_own_rows(engine):
    prompts = [seeds.rng().integers(3, 259, 9).tolist()] * 4
    ((alone,),) = engine.generate(prompts[:1], PLAIN)
    allowed = tuple(range(40, 50))
    word = engine.tokenizer.decode(alone.tokens[:1])
    options = [
        PLAIN,
        replace(PLAIN, allowed_token_ids=allowed, logprobs=0),
        replace(PLAIN, stop_token_ids=tuple(range(3, 264)), ignore_eos=False, min_tokens=4, logit_bias={0: -100.0}),
        replace(PLAIN, bad_words=(word,), temperature=0.0) if word.isascii() else PLAIN,
    ]
    found = [one for (one,) in engine.generate(prompts, options)]
    assert found[0] == alone
    assert set(found[1].tokens) <= set(allowed) and found[1].logprobs[0] < 0
    # All others end the text: only 0, 1 and 2 may come first.
    assert len(found[2].tokens) == 5 and max(found[2].tokens[:4]) < 3 and found[2].finish_reason == "stop"
    assert word not in found[3].text or not word.isascii()


def test_texts_follow_their_grammars(engine):
    """An untrained model follows the grammar in several continuations, while other requests run."""
    pytest.importorskip("llguidance")
    prompt = engine.tokenizer("Where?")["input_ids"]
    drawn = replace(PLAIN, max_new_tokens=100, ignore_eos=False, stop_token_ids=(0,))
    options = [
        replace(drawn, grammar=grammar.json_grammar(SCHEMA), n=3),
        replace(drawn, grammar=grammar.choice_grammar(["yes", "no"])),
        replace(drawn, grammar=grammar.regex_grammar("[a-f]{3}/[0-9]+"), max_new_tokens=8),
        PLAIN,
    ]
    several, (choice,), (matched,), (free,) = engine.generate([prompt] * 4, options)
    for one in several:
        if one.finish_reason == "stop":
            assert json.loads(one.text).keys() == {"city", "open"} and one.tokens[-1] == 0
    assert any(one.finish_reason == "stop" for one in several)
    assert choice.text in ("yes", "no") and choice.finish_reason == "stop"
    assert matched.text[3] == "/" and matched.finish_reason == "length"
    assert free == engine.generate([prompt], PLAIN)[0][0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_an_untrained_model_calls_tools(engine, choice, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(engine.tokenizer, "chat_template", tiny.CHATML + "{#<tool_call>{{tools}}#}")
    find = {"name": "find", "parameters": SCHEMA}
    tools = [{"type": "function", "function": each} for each in (find, {"name": "clock", "parameters": {"type": "null"}})]
    options = SamplingOptions(max_new_tokens=120, temperature=1.0, seed=1, n=2)
    replies = engine.chat("Where?", options, tools=tools, tool_choice=choice)
    for reply in replies:
        if reply.completion.finish_reason == "stop":
            assert reply.calls and not reply.text
            assert {call["name"] for call in reply.calls} <= ({"find", "clock"} if choice == "required" else {"clock"})
    assert choice == "required" or any(reply.calls for reply in replies)


@pytest.mark.parametrize(
    "text, message",
    [
        (grammar.json_grammar({"properties": {"a": {"items": {"type": "objekt"}}}}), "at properties.a.items: Invalid type"),
        (grammar.regex_grammar("("), "cannot be compiled: .*unclosed group"),
        ("start: x", 'unknown name: "x"'),
    ],
)
def test_wrong_grammars_are_refused(engine, text, message):
    pytest.importorskip("llguidance")
    with pytest.raises(ValueError, match=message):
        engine.submit([1], replace(PLAIN, grammar=text))


def test_grammars_need_their_package(monkeypatch):
    monkeypatch.setattr(grammar, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'moe_jax\[grammar\]'"):
        grammar.Grammars(tiny.tokenizer(), 264)
