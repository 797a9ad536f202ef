"""Ready rewards against cases by hand."""

import signal
import sys
import threading
import types

import numpy as np
import pytest

from moe_jax.reinforcement import load_reward, score
from moe_jax.reinforcement.ready_rewards import READY
from tests.helpers.groups import group


def rewards_of(name, texts, **columns):
    """Returns the rewards of texts, called as a run does, but without processes."""
    function = load_reward(name).function if isinstance(name, str) else name
    return score([group(texts=texts, row={"prompt": "?", **columns})], [function])[0].rewards[:, 0].tolist()


@pytest.mark.parametrize("name", READY)
def test_names(name):
    reward = load_reward(name)
    assert reward.name == name and reward.place == f"moe_jax.reinforcement.ready_rewards:{name}"


def test_exact():
    assert rewards_of("exact", ["5", " 5\n", "5.", "15", ""], answer=5) == [1, 1, 0, 0, 0]


def test_contains():
    assert rewards_of("contains", ["It is 5.", "5", "four"], answer="5 ") == [1, 1, 0]


def test_matches():
    assert rewards_of("matches", ["<a>\n</a>", "a", ""], pattern=r"<a>.*</a>$") == [1, 0, 0]


def test_is_json():
    texts = ['{"a": [1]}', "```json\n[1]\n```", "3", "{'a': 1}", "", "[" * 100_000]
    assert rewards_of("is_json", texts) == [1, 1, 1, 0, 0, 0]


def test_python_parses():
    texts = ["def f():\n    return 1", "Code:\n```python\nx = 1\n```\n", "def f(", "", "x = 1\0", "(" * 5000]
    assert rewards_of("python_parses", texts) == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "column", [{"answer": "5"}, {"solution": "5"}, {"ground_truth": "5"}, {"reward_model": {"ground_truth": "5"}}]
)
def test_columns_of_wanted_answers(column):
    assert rewards_of("exact", ["5", "6"], **column) == [1, 0]


@pytest.mark.parametrize("column", [{"label": "5"}, {"answer": None}, {"reward_model": {"style": "rule"}}])
def test_no_wanted_answer(column):
    with pytest.raises(
        RuntimeError, match=f"reward function exact raised ValueError: needs the wanted .* has .*{[*column][0]}"
    ):
        rewards_of("exact", ["5"], **column)


def test_chats_are_scored_by_the_last_answer():
    turns = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "6"}]
    completions = [turns, [{"role": "assistant", "content": "5"}], [], [{"role": "assistant", "content": None}]]
    assert load_reward("exact").function(completions, answer=["5"] * 4) == [0, 1, 0, 0]


def test_math_names_the_package_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RuntimeError, match="raised ImportError: the reward `math` .* pip install math-verify"):
        rewards_of("math", ["1"], answer="1")


@pytest.fixture
def math_verify(monkeypatch):
    """A replacement for math-verify: it hides errors of its alarm, as math-verify does, and reads numbers."""

    def with_alarm(work, limit):
        try:
            if limit is not None:
                signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
            return work()
        except Exception:
            return None

    def parse(text, parsing_timeout=5):
        return with_alarm(lambda: [float(text.strip("$").rpartition(" ")[2])], parsing_timeout) or []

    def verify(gold, target, timeout_seconds=5):
        return bool(with_alarm(lambda: gold == target, timeout_seconds))

    monkeypatch.setitem(sys.modules, "math_verify", types.SimpleNamespace(parse=parse, verify=verify))


def test_math(math_verify):
    assert rewards_of("math", ["it is 0.50", "1", "none"], answer=0.5) == [1, 0, 0]
    np.testing.assert_array_equal(rewards_of("math", ["1"], answer="unreadable"), [np.nan])


def test_math_works_outside_the_main_thread(math_verify):
    found = []
    thread = threading.Thread(target=lambda: found.extend(rewards_of("math", ["2", "1"], answer="1")))
    thread.start()
    thread.join()
    assert found == [0, 1]
