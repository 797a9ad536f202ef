"""An engine refuses requests, prompts, options, models and limits that do not fit, before anything runs."""

import re
from contextlib import closing
from dataclasses import replace

import jax.numpy as jnp
import pytest

from moe_jax.serving.engine import GREEDY, Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import tiny

LIMITS = EngineLimits(max_sequences=2, max_tokens_per_step=64, max_length=256, num_pages=4, max_waiting=7)


@pytest.fixture(scope="module")
def engine():
    """It compiles nothing, because no request ever runs."""
    with closing(Engine(tiny.dense(), limits=LIMITS, lazy=True)) as engine:
        yield engine


def test_bad_requests(engine):
    """Options are checked as in tests/serving/test_request.py; stop texts need a tokenizer."""
    for options, message in (
        ({"top_p": 2.0, "n": 0}, "top_p must be .*; n must be"),
        ({"stop": ("x",)}, "texts need .*tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit([1], SamplingOptions(**options))


def test_a_request_beyond_the_models_positions_warns_once(engine, caplog, monkeypatch):
    monkeypatch.setattr("moe_jax.generation.request._warned_of", set())
    monkeypatch.setattr(engine, "config", replace(engine.config, max_position_embeddings=6))
    engine.pause()
    for new, warnings in ((3, 0), (4, 1), (4, 1)):
        engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=new)).abort()
        assert caplog.text.count("more than the model's max_position_embeddings of 6") == warnings
    engine.resume()


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        *(
            (prompts, GREEDY, f"prompts must be a list of lists of token ids; got {re.escape(repr(prompts))}; for text see")
            for prompts in ("text", ["text"], [1, 2, 3], None)
        ),
        ([[1]], None, "options must be SamplingOptions; got None"),
        ([[1], [2]], {"max_new_tokens": 4}, "options must be SamplingOptions; got {'max_new_tokens': 4}"),
        ([[1], [2]], [GREEDY], "options must be one for all prompts, or one for each of 2; got 1"),
    ],
)
def test_other_types_than_prompts_and_options(engine, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, options)


def test_other_types_than_models_and_limits(engine):
    with pytest.raises(ValueError, match=r"model must be a Decoder, as moe_jax.from_pretrained\(folder\) returns; got str"):
        Engine("folder")
    with pytest.raises(ValueError, match="model must be a Decoder, .*; got NoneType"):
        engine.update(None)
    with pytest.raises(ValueError, match="limits must be EngineLimits; got {'max_length': 8}"):
        Engine(tiny.dense(), limits={"max_length": 8})
    with pytest.raises(ValueError, match='kv_dtype="fp8" needs a model in bfloat16 or float32; got float16'):
        Engine(tiny.dense(dtype=jnp.float16), limits=replace(LIMITS, kv_dtype="fp8"))
