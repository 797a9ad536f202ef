"""A load's times are those that the engine took."""

import pytest

from moe_jax.serving.measurements import Load, measure_loads
from moe_jax.serving.request import EngineLimits
from tests.helpers import fake_engine

STEP = 0.02


@pytest.fixture
def engine():
    limits = EngineLimits(max_sequences=4, max_tokens_per_step=64, max_length=64, num_pages=16, max_waiting=8)
    engine = fake_engine.FakeEngine(limits, step_seconds=STEP)
    yield engine
    engine.close()


def test_times_are_those_of_the_steps(engine):
    """Four run at once, and each step gives each a token; the other four wait until the first four have ended."""
    few, many = measure_loads(engine, [Load(4, 2, 5, 6), Load(8, 1, 5, 6)])
    assert len(engine.submitted) == 1 + 8 + 8
    for measured in (few, many):
        # A request may come when its first step is nearly over.
        assert measured.seconds >= (2 * 6 - 1) * STEP
        assert measured.tokens_per_second == pytest.approx(48 / measured.seconds)
        assert 0 < measured.each_token[0] <= measured.each_token[1]
    # Upper bounds in seconds would fail on a busy machine.
    assert 2 * (few.first_token[0] + 5 * few.each_token[0]) == pytest.approx(few.seconds, rel=0.1)
    assert few.first_token[0] < 3 * few.each_token[0]
    assert many.first_token[1] > 5 * STEP


@pytest.mark.parametrize("lazy, sent", [(False, 1 + 4), (True, 1 + 2 * 4)])
def test_a_lazy_engine_compiles_before_a_load_is_counted(engine, lazy, sent):
    engine.lazy = lazy
    (measured,) = measure_loads(engine, [Load(2, 2, 8, 2)], 0)
    assert len(engine.handles) == sent and measured.load.clients == 2


def test_prompts_are_seeded_and_never_come_twice(engine):
    def prompts(seed):
        engine.handles.clear()
        list(measure_loads(engine, [Load(2, 2, 8, 2)], seed))
        return {tuple(handle.prompt) for handle in engine.handles}

    first = prompts(0)
    assert len(first) == 5 and prompts(0) == first and not prompts(1) & first


def test_a_request_that_ends_early_is_no_measurement(engine, monkeypatch):
    monkeypatch.setattr(fake_engine.FakeEngine, "submit", ends_early(fake_engine.FakeEngine.submit))
    with pytest.raises(RuntimeError, match="ended a request after 1 of 4 tokens"):
        list(measure_loads(engine, [Load(1, 1, 8, 4)]))


def ends_early(submit):
    """Asks for one token, no matter what the options are."""
    return lambda self, prompt, options: submit(self, prompt, Load(1, 1, 1, 1).options)


@pytest.mark.parametrize(
    "load, message",
    [
        (Load(0, 1, 8, 4), "clients must be at least 1; got 0"),
        (Load(1, 0, 8, 4), "requests_each must be at least 1; got 0"),
        (Load(1, 1, 0, 4), "prompt_tokens must be at least 1; got 0"),
        (Load(1, 1, 8, 1), "new_tokens must be at least 2; got 1"),
        (Load(1, 1, 60, 8), "exceed the engine's max_length=64"),
        (Load(9, 1, 8, 4), "clients must be at most max_waiting=8; got 9"),
    ],
)
def test_loads_that_cannot_run_are_refused(engine, load, message):
    with pytest.raises(ValueError, match=message):
        list(measure_loads(engine, [Load(1, 1, 8, 4), load]))
    assert not engine.submitted
