"""Drafts from the text: an engine with them has the tokens of one without, and sequences whose drafts lose have none."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=8, max_chunks_per_step=2, max_length=192, num_pages=5, max_waiting=50
)
GREEDY, DRAWN = SamplingOptions(), SamplingOptions(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def engine():
    """An engine with three drafts. Greedy texts soon repeat."""
    with closing(Engine(tiny.dense(), limits=LIMITS, drafts="lookup:3", lazy=True)) as engine:
        yield engine
        stats = engine.stats()
        assert stats.owned_pages == stats.running == stats.waiting == 0


def counted(engine, options):
    """Returns the tokens after a prompt, and the numbers of steps, drafts and accepted drafts that they took."""
    before = engine.stats()
    ((completion,),) = engine.generate([[3, 4]], replace(options, ignore_eos=True))
    after = engine.stats()
    names = "num_steps", "num_drafted", "num_accepted"
    return completion.tokens, *(getattr(after, name) - getattr(before, name) for name in names)


@pytest.mark.thorough
def test_tokens_are_those_without_drafts(engine):
    """An engine without drafts computes the same tokens, one sequence at a time.

    Continuations of one prompt, penalties, constraints, too few pages, ends in the middle of drafts: no token changes.
    """
    rng = seeds.rng()
    loop = [5, 9, 2, 7]
    several = [
        (20 * loop, replace(GREEDY, max_new_tokens=100)),
        (rng.integers(0, 264, 40).tolist(), replace(GREEDY, max_new_tokens=150)),
        (5 * loop, replace(DRAWN, n=3, max_new_tokens=30, logprobs=1)),
        (5 * loop, replace(GREEDY, allowed_token_ids=(5, 9, 2), max_new_tokens=40)),
        (5 * loop, replace(GREEDY, frequency_penalty=0.2, logit_bias={5: 3.0}, max_new_tokens=40)),
        *((5 * loop, replace(DRAWN, temperature=0.2, max_new_tokens=number)) for number in (1, 2, 3, 6, 7)),
    ]
    prompts, options = zip(*((prompt, replace(each, ignore_eos=True)) for prompt, each in several), strict=True)
    with closing(Engine(tiny.dense(), limits=replace(LIMITS, max_sequences=1), lazy=True)) as alone:
        plain, before = alone.generate(prompts, options), alone.stats()
    drafted, after = engine.generate(prompts, options), engine.stats()
    for each, same in zip(plain, drafted, strict=True):
        assert [(one.tokens, one.finish_reason) for one in same] == [(one.tokens, one.finish_reason) for one in each]
        for one, other in zip(each, same, strict=True):
            np.testing.assert_allclose(one.logprobs or [], other.logprobs or [], atol=1e-4)
    assert before.num_drafted == 0 and 0 < after.num_accepted < after.num_drafted
    assert after.num_preemptions and after.num_tokens == before.num_tokens


def test_repeated_text_is_accepted(engine):
    """A token that is drawn again and again comes four at a time; a stop token within drafts ends the text there."""
    tokens, steps, drafted, accepted = counted(engine, replace(GREEDY, max_new_tokens=120, logit_bias={8: 100}))
    assert tokens == [8] * 120
    assert steps < 0.3 * 120 and accepted >= 0.95 * drafted > 80
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    ((stopped,),) = engine.generate([prompt], SamplingOptions(stop_token_ids=(8,), logit_bias={8: 100}))
    assert (stopped.tokens, stopped.finish_reason) == ([8], "stop")


def test_random_text_has_no_drafts(engine, monkeypatch):
    """Nearly all tokens are equally likely, so few pairs repeat: the program without drafts runs."""
    device = engine._loop.device
    launched, launch = [], device._compute
    monkeypatch.setattr(device, "_compute", lambda shape, *rest: (launched.append(shape.drafts), launch(shape, *rest))[1])
    counted(engine, SamplingOptions(max_new_tokens=150, temperature=50.0, top_p=1.0, seed=seeds.integer()))
    assert len(launched) > 140 and launched.count(3) < 10
