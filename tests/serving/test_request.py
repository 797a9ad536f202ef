"""A request is checked whole before anything runs: each wrong option is named, and all problems are in one error."""

import re
from dataclasses import replace

import numpy as np
import pytest

from moe_jax.serving.request import EngineLimits, SamplingOptions, checked, seeds_of

VOCAB_SIZE = 100
LIMITS = EngineLimits(max_sequences=4, max_tokens_per_step=128, max_length=200, num_pages=3, max_waiting=8)


@pytest.mark.parametrize("prompt", [[1, 2, 99], (1, 2, 99), np.array([1, 2, 99], np.int32)])
def test_prompts_come_back_as_ints(prompt):
    tokens = checked(prompt, SamplingOptions(), LIMITS, VOCAB_SIZE)
    assert tokens == [1, 2, 99] and all(type(token) is int for token in tokens)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty; it must have at least one token"),
        ([1, 100], "the prompt has token 100, outside the vocabulary of 100"),
        ([-1], "the prompt has token -1, outside"),
        ([1.5], r"the prompt must be a flat list of token ids; got \[1.5\]"),
        ("hello", "flat list of token ids; got 'hello'"),
        ([[1], [2, 3]], r"flat list of token ids; got \[\[1\], \[2, 3\]\]"),
        ([2**80], "flat list of token ids; got"),
        (None, "flat list of token ids; got None"),
        ([True], "flat list of token ids"),
        ([1] * 129, "a prompt of 129 tokens and the first token of its answer exceed the 129 tokens that"),
        ([1] * 66, "66 tokens and max_new_tokens=64 exceed the 129 tokens that the engine's pages hold"),
    ],
)
def test_wrong_prompts_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        checked(prompt, SamplingOptions(), LIMITS, VOCAB_SIZE)


@pytest.mark.parametrize(
    "num_pages, longest, message",
    [(3, 129, "the 129 tokens that the engine's pages hold"), (9, 200, "the engine's max_length=200")],
)
def test_a_request_may_fill_all_pages_or_max_length(num_pages, longest, message):
    limits = replace(LIMITS, num_pages=num_pages)
    assert limits.longest_request == longest
    checked([1] * (longest - 64), SamplingOptions(), limits, VOCAB_SIZE)
    with pytest.raises(ValueError, match=f"max_new_tokens=64 exceed {message}"):
        checked([1] * (longest - 63), SamplingOptions(), limits, VOCAB_SIZE)


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"max_new_tokens": 0}, "an integer, at least 1; got 0"),
        ({"max_new_tokens": True}, "an integer, at least 1; got True"),
        ({"temperature": -1.0}, "a finite number, 0 or more; got -1.0"),
        ({"temperature": 1e39}, "a finite number, 0 or more; got 1e+39"),
        ({"temperature": 10**400}, "a finite number, 0 or more; got 1000"),
        ({"top_p": np.float16(0)}, "None or a number in (0, 1]; got np.float16(0.0)"),
        ({"temperature": np.float16("inf")}, "a finite number, 0 or more; got np.float16(inf)"),
        ({"top_p": 1e-39}, "None or a number in (0, 1]; got 1e-39"),
        ({"repetition_penalty": 1e-39}, "a finite number above 0; got 1e-39"),
        ({"temperature": float("nan")}, "a finite number, 0 or more; got nan"),
        ({"temperature": "0"}, "a finite number, 0 or more; got '0'"),
        ({"top_k": 0}, "None or an integer, at least 1; got 0"),
        ({"top_p": 0.0}, "None or a number in (0, 1]; got 0.0"),
        ({"top_p": 1.1}, "None or a number in (0, 1]; got 1.1"),
        ({"min_p": -0.1}, "None or a number in [0, 1]; got -0.1"),
        ({"repetition_penalty": 0.0}, "a finite number above 0; got 0.0"),
        ({"presence_penalty": 2.5}, "a number in [-2, 2]; got 2.5"),
        ({"frequency_penalty": None}, "a number in [-2, 2]; got None"),
        ({"logit_bias": {100: 1.0}}, "token ids below 100 to numbers in [-100, 100]; got {100: 1.0}"),
        ({"logit_bias": {1: 101}}, "token ids below 100 to numbers in [-100, 100]; got {1: 101}"),
        (
            {"logit_bias": dict.fromkeys(range(100), 101)},
            "got {0: 101, 1: 101, 2: 101, 3: 101, 4: 101, 5: 101, 6: 101, 7: 101, 8: 101, 9: 1...",
        ),
        ({"logit_bias": [1]}, "a mapping of at most 300 token ids"),
        ({"stop_token_ids": (100,)}, "a tuple of token ids below 100; got (100,)"),
        ({"stop_token_ids": 3}, "a tuple of token ids below 100; got 3"),
        ({"stop": "end"}, "a tuple of texts, none of them empty; got 'end'"),
        ({"stop": ("",)}, "a tuple of texts, none of them empty; got ('',)"),
        ({"ignore_eos": 1}, "True or False; got 1"),
        ({"seed": -1}, "None or an integer in [0, 2**32); got -1"),
        ({"seed": 2**32}, "None or an integer in [0, 2**32); got 4294967296"),
        ({"n": 0}, "an integer, at least 1; got 0"),
        ({"logprobs": 21}, "None or an integer in [0, 20]; got 21"),
        ({"prompt_logprobs": -1}, "None or an integer in [0, 20]; got -1"),
        ({"return_experts": None}, "True or False; got None"),
    ],
)
def test_wrong_options_are_named(options, wanted):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} must be .*{re.escape(wanted)}"):
        checked([1], SamplingOptions(**options), LIMITS, VOCAB_SIZE)


def test_options_that_are_right():
    checked([1], SamplingOptions(), LIMITS, VOCAB_SIZE)
    right = SamplingOptions(
        max_new_tokens=np.int64(3), temperature=np.float32(0.5), top_k=1, top_p=1, min_p=0, repetition_penalty=1.2, seed=0,
        presence_penalty=-2, frequency_penalty=2.0, logit_bias={99: -100}, stop_token_ids=[0, 99], stop=["a"], ignore_eos=True,
        n=8, logprobs=0, prompt_logprobs=20, return_experts=True,
    )  # fmt: skip
    checked([1], right, LIMITS, VOCAB_SIZE)
    with pytest.raises(ValueError, match="n must be at most max_waiting=8; got 9"):
        checked([1], replace(right, n=9), LIMITS, VOCAB_SIZE)


def test_all_problems_stand_in_one_error():
    with pytest.raises(ValueError, match="the prompt is empty.*; temperature must be.*; n must be"):
        checked([], SamplingOptions(temperature=-1, n=0), LIMITS, VOCAB_SIZE)
    with pytest.raises(ValueError, match="options must be SamplingOptions; got {}"):
        checked([1], {}, LIMITS, VOCAB_SIZE)


def test_continuations_have_seeds_of_their_own():
    three = seeds_of(SamplingOptions(seed=5, n=3))
    assert three == seeds_of(SamplingOptions(seed=5, n=3)) and len(set(three)) == 3
    assert seeds_of(SamplingOptions(seed=5)) == three[:1] == [5]
    assert all(0 <= seed < 2**32 for seed in seeds_of(SamplingOptions(n=100)))


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"max_sequences": 0}, "max_sequences must be an integer, at least 1; got 0"),
        ({"max_length": 2.0, "num_pages": None}, "max_length must be.*; num_pages must be an integer, at least 1; got None"),
        ({"max_sequences": 9, "max_tokens_per_step": 8}, "one token for each; got 8 and 9"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"kv_dtype": "int8"}, 'kv_dtype must be "model" or "fp8"; got \'int8\''),
    ],
)
def test_wrong_limits_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        EngineLimits(**limits)
