"""Rewards: how functions are found and called, and what happens if they go wrong."""

import asyncio
import functools
import logging
import random
import re
import time
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from moe_jax.reinforcement import Scorer, from_verl, load_reward, score
from tests.helpers import some_rewards
from tests.helpers.groups import group, sample

PLACE = f"{some_rewards.__name__}:"


def ones(completions, **columns):
    return [1.0] * len(completions)


def returning(*values):
    """Returns a reward function with this result."""
    return lambda completions, **columns: list(values)


def rewards_of(function, **options):
    return score([group()], [function], **options)[0].rewards[:, 0].tolist()


class TestSignature:
    """Arguments of a call, and its results."""

    def test_texts(self):
        seen = {}

        def reward(**keywords):
            seen.update(keywords)
            return [0.0, 0.0]

        score([group(3, ("x", "yz"))], [reward])
        assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
        assert seen == {
            "prompts": ["prompt 3"] * 2,
            "completions": ["x", "yz"],
            "completion_ids": [[ord("x")], [ord("y"), ord("z")]],
            "finish_reasons": ["stop", "stop"],
            "seeds": [300, 301],
            "answer": [3, 3],
            "trainer_state": None,
        }

    def test_chats_are_messages(self):
        prompt = [{"role": "user", "content": "?"}]
        turns = [{"role": "assistant", "content": "<tool_call>"}, {"role": "tool", "content": "4"}]
        samples = sample("x"), sample("y", turns=turns)

        def reward(prompts, completions, **columns):
            assert prompts == [prompt, prompt]
            assert completions == [[{"role": "assistant", "content": "x"}], turns]
            return [0, 1]

        assert score([group(row={"prompt": prompt}, samples=samples)], [reward])[0].rewards.tolist() == [[0], [1]]

    def test_a_function_may_name_only_what_it_reads(self):
        assert rewards_of(
            lambda completions, seeds: [len(each) + seed for each, seed in zip(completions, seeds, strict=True)]
        ) == [1, 2]

    def test_a_function_cannot_change_a_row(self):
        row = {"prompt": "?", "answer": [1]}

        def reward(answer, **columns):
            answer[0].append(2)
            return [len(each) for each in answer]

        assert score([group(row=row)], [reward])[0].rewards.tolist() == [[2], [1]]
        assert row["answer"] == [1]

    def test_the_trainer_state_is_passed_on(self):
        with Scorer([lambda trainer_state, **columns: [trainer_state["step"]] * 2]) as scorer:
            assert next(scorer.score([group()], {"step": 5})).rewards.tolist() == [[5], [5]]

    def test_columns_and_metrics_are_logged(self):
        def reward(completions, log_extra, log_metric, **columns):
            log_extra("found", completions)
            log_metric("length", 1)
            log_metric("length", np.float32(2))
            return [0, 0]

        failed = sample(finish_reason="abort")
        of = group(samples=(failed, *group().samples))
        scored = score([of], [reward])[0]
        assert scored.extras == {"found": [None, "a", "b"]} and scored.metrics == {"length": 1.5}

    def test_rewards_are_called_in_the_calling_thread(self):
        assert rewards_of(some_rewards.in_main_thread) == [1, 1]

    def test_several_functions_have_a_column_each(self):
        with Scorer([ones, returning(0.5, None), PLACE + "of_names"]) as scorer:
            assert scorer.names == ("ones", "<lambda>", "of_names")
            found = next(scorer.score([group()])).rewards
        np.testing.assert_array_equal(found, [[1, 0.5, 0.125], [1, np.nan, 0.125 + 1 / 1024]])

    def test_an_environment_has_the_last_column(self):
        samples = sample(reward=0.25), sample(finish_reason="error")
        found = score([group(samples=samples)], [ones], environment="Guess")[0].rewards
        np.testing.assert_array_equal(found, [[1, 0.25], [np.nan, np.nan]])
        assert Scorer([], environment="Guess").names == ("Guess",)


class TestNumbers:
    """Results that are numbers, and others."""

    @pytest.mark.parametrize("value", [1, True, np.bool_(True), np.float32(1), np.int8(1), np.array(1.0)])
    def test_kinds_of_numbers(self, value):
        assert rewards_of(returning(value, 0)) == [1, 0]

    def test_an_array_of_rewards(self):
        assert rewards_of(lambda completions, **columns: np.array([0.5, 1])) == [0.5, 1]

    def test_none_leaves_a_sample_out(self):
        np.testing.assert_array_equal(rewards_of(returning(None, 2)), [np.nan, 2])

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, np.float32("nan"), "1.0", [1], 1j, 10**400])
    def test_anything_else_is_an_error_that_names_the_sample(self, value):
        with pytest.raises(ValueError, match=r"function <lambda> returned .* for sample 1; .*prompt 0: 'prompt 0'.*1: 'b'"):
            rewards_of(returning(0.5, value))

    @pytest.mark.parametrize("values", [(), (1,), (1, 2, 3)])
    def test_a_wrong_number_of_rewards(self, values):
        with pytest.raises(ValueError, match=f"returned {len(values)} rewards for 2 samples"):
            rewards_of(returning(*values))

    @pytest.mark.parametrize("value", [None, 0.5, "ab", {"a": 1, "b": 2}])
    def test_no_list(self, value):
        with pytest.raises(ValueError, match="not a list with one number of each of the 2 samples"):
            rewards_of(lambda completions, **columns: value)

    def test_bad_numbers_are_errors_in_processes_too(self):
        with pytest.raises(ValueError, match="function is_nan returned nan for sample 1"):
            rewards_of(PLACE + "is_nan", on_reward_error="none")

    def test_wrong_number_of_logged_values(self):
        def reward(log_extra, **columns):
            log_extra("found", [1])
            return [0, 0]

        with pytest.raises(ValueError, match="logged 1 values of 'found', not one of each of the 2 samples"):
            rewards_of(reward)


async def slow(**columns):
    await asyncio.sleep(60)


def raises(**columns):
    raise KeyError("no such thing")


async def raises_async(**columns):
    raise KeyError("no such thing")


class TestErrors:
    """Functions that raise, hang or end their process, and samples that failed."""

    @pytest.mark.parametrize(
        "reward, error",
        [
            (raises, "raised KeyError: 'no such thing' (test_rewards.py, line "),
            (raises_async, "raised KeyError: 'no such thing' (test_rewards.py, line "),
            (PLACE + "raises", "raised KeyError: 'no such thing' (some_rewards.py, line "),
            (PLACE + "leaves", "raised SystemExit: 2"),
            (PLACE + "exits", "ended its process, with exit code 3"),
            (PLACE + "logs_a_lock", "raised TypeError: cannot pickle"),
            (slow, "did not end within 0.5 s, and was cancelled"),
        ],
    )
    def test_stop_or_none(self, reward, error, caplog):
        options = {"reward_timeout": 0.5} if reward is slow else {}
        with pytest.raises(
            RuntimeError, match=rf"the reward function \w+ {re.escape(error)}.*prompt 0: 'prompt 0'; answers 0: 'a'; 1: 'b'"
        ):
            rewards_of(reward, **options)
        found = score([group()], [reward, ones], on_reward_error="none", **options)[0].rewards
        np.testing.assert_array_equal(found, [[np.nan, 1], [np.nan, 1]])
        assert error in caplog.text

    def test_the_traceback_of_a_process_is_shown(self):
        with pytest.raises(RuntimeError) as raised:
            rewards_of(PLACE + "raises")
        assert "some_rewards.py" in "".join(raised.value.__cause__.__notes__)

    def test_a_hung_process_is_killed_with_its_children(self, tmp_path):
        note = tmp_path / "processes"
        hung = group(1, row={"prompt": "?", "answer": str(note)})
        with Scorer([PLACE + "hangs"], reward_timeout=2.0, on_reward_error="none") as scorer:
            assert np.isnan(next(scorer.score([hung])).rewards).all()
            assert not any(map(some_rewards.is_running, note.read_text().split()))

    def test_a_killed_process_is_replaced(self, tmp_path):
        rows = [{"prompt": "?", "answer": str(tmp_path / str(key))} for key in range(5)]
        groups = [group(key, row=row) for key, row in enumerate(rows)]
        rewards = [PLACE + "hangs", PLACE + "process"]
        found = score(groups, rewards, reward_timeout=1.0, on_reward_error="none")
        assert all(np.isnan(each.rewards[:, 0]).all() and (each.rewards[:, 1] > 0).all() for each in found)

    def test_a_callable_that_hangs_is_named(self, caplog):
        def slow_one(completions, **columns):
            while "reward function slow_one has run for 0.1 s" not in caplog.text:
                time.sleep(0.01)
            return [0, 0]

        assert rewards_of(slow_one, reward_timeout=0.1) == [0, 0]

    def test_close_ends_calls_that_run(self, tmp_path):
        note = tmp_path / "processes"
        scorer = Scorer([PLACE + "hangs", slow])
        waiting = scorer.score(iter([group(row={"prompt": "?", "answer": str(note)}), group(1, texts=())]))
        assert next(waiting).key == 1
        while not (note.exists() and note.read_text().endswith("\n")):
            time.sleep(0.02)
        waiting.close()
        scorer.close()
        assert not any(map(some_rewards.is_running, note.read_text().split()))

    def test_failed_samples_are_not_shown(self):
        samples = (
            sample("a"),
            sample("b", finish_reason="abort"),
            sample("c", finish_reason="length"),
            sample("d", finish_reason="error"),
        )

        def reward(completions, finish_reasons, **columns):
            assert completions == ["a", "c"] and finish_reasons == ["stop", "length"]
            return [1, 2]

        found = score([group(samples=samples)], [reward])[0].rewards
        np.testing.assert_array_equal(found, [[1], [np.nan], [2], [np.nan]])

    def test_a_group_of_failed_samples_calls_nothing(self):
        found = score([group(samples=(sample(finish_reason="error"),))], [raises])[0].rewards
        np.testing.assert_array_equal(found, [[np.nan]])


class TestLoading:
    """Functions by their place."""

    def test_a_function_of_a_file(self, tmp_path):
        (tmp_path / "neighbor.py").write_text("WORTH = 0.5\n")
        (tmp_path / "mine.py").write_text(
            "from neighbor import WORTH\ndef half(completions, **columns): return [WORTH for _ in completions]\n"
        )
        reward = f"{tmp_path}/mine.py:half"
        assert load_reward(reward).name == "half"
        assert rewards_of(reward) == [0.5, 0.5]

    @pytest.mark.parametrize(
        "place, error",
        [
            ("no_file.py:f", "cannot be imported: FileNotFoundError"),
            ("no_module:f", "cannot be imported: ModuleNotFoundError"),
            (PLACE + "nothing", "has no function or class 'nothing'; it has .*of_names"),
            (PLACE + "A_CONSTANT", "has no function or class 'A_CONSTANT'"),
            ("exakt", "must be file.py:function, module:function, or one of exact, contains"),
            (3, "must be a function, or the place of one; got 3"),
        ],
    )
    def test_no_such_function(self, place, error):
        with pytest.raises(ValueError, match=error):
            load_reward(place)

    def test_a_file_that_raises(self, tmp_path):
        (tmp_path / "mine.py").write_text("1 / 0\n")
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError"):
                load_reward(f"{tmp_path}/mine.py:f")

    def test_names_of_callables(self):
        class Judge:
            def __call__(self, completions, **columns):
                return [1, 1]

        rewards = [Judge(), functools.partial(ones), functools.partial(ones, x=1)]
        assert [load_reward(each).name for each in rewards] == ["Judge", "ones", "ones"]
        assert rewards_of(Judge()) == [1, 1]

    def test_async_callables(self):
        class Judge:
            async def __call__(self, completions, **columns):
                return [1, 1]

        assert load_reward(Judge()).is_async and load_reward(functools.partial(slow)).is_async
        assert rewards_of(Judge()) == [1, 1]

    @pytest.mark.parametrize(
        "rewards, options, error",
        [
            ([], {}, "at least one function"),
            ([ones, ones], {}, "must have different names, .*got ones, ones"),
            ([ones], {"reward_timeout": 0}, "reward_timeout must be greater than 0 seconds; got 0"),
            ([ones], {"on_reward_error": "skip"}, "on_reward_error must be stop or none; got 'skip'"),
        ],
    )
    def test_bad_options(self, rewards, options, error):
        with pytest.raises(ValueError, match=error):
            Scorer(rewards, **options)


class TestVerl:
    """Functions with verl's signature."""

    ROW = {
        "prompt": [{"role": "user", "content": "?"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "b"},
        "extra_info": {"index": 7},
    }

    @pytest.mark.parametrize("reward", [from_verl(some_rewards.compute_score), PLACE + "compute_score"])
    def test_scores_and_columns(self, reward):
        scored = score([group(row=self.ROW)], [reward])[0]
        assert scored.rewards.tolist() == [[0], [1]]
        assert scored.extras == {"source": ["sums"] * 2, "index": [7, 7]}
        assert load_reward(reward).name == "compute_score"

    def test_numbers_alone(self):
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 0.5 if solution_str == ground_truth else None

        found = score([group(row=self.ROW | {"extra_info": None})], [from_verl(compute_score)])[0]
        np.testing.assert_array_equal(found.rewards, [[np.nan], [0.5]])

    def test_async(self):
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str == ground_truth)

        assert score([group(row=self.ROW)], [from_verl(compute_score)])[0].rewards.tolist() == [[0], [1]]


@pytest.fixture(scope="module")
def scorers():
    """Functions in processes, in this thread, in the event loop, and all three at once."""
    kinds = [PLACE + "of_names", renamed(some_rewards.of_names, "here"), some_rewards.of_names_async]
    made = [Scorer([kind]) for kind in kinds] + [Scorer(kinds)]
    yield made
    for scorer in made:
        scorer.close()


class TestOrder:
    """Any order in which functions end gives the same groups."""

    def test_groups_come_as_soon_as_they_have_their_rewards(self):
        arrived = []

        def arriving():
            for key in range(3):
                arrived.append(key)
                yield group(key)

        with Scorer([ones]) as scorer:
            for scored in scorer.score(arriving()):
                assert arrived == list(range(scored.key + 1))

    @hypothesis.given(seed=st.integers(0, 2**32))
    @hypothesis.settings(max_examples=5, deadline=None)
    def test_random_times(self, scorers, seed):
        draw = random.Random(seed)
        groups = [group(key, ["x" * draw.randrange(4) for _ in range(3)]) for key in range(8)]
        wanted = [np.array([[each.key + len(s.text) / 8 + i / 1024] for i, s in enumerate(each.samples)]) for each in groups]
        for scorer in scorers:
            waiting = [replace(each, row={**each.row, "wait": draw.random() / 30}) for each in groups]
            draw.shuffle(waiting)
            found = sorted(scorer.score(waiting), key=lambda each: each.key)
            for each, rewards in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(each.rewards, np.broadcast_to(rewards, each.rewards.shape))
                assert each.extras["number"] == [s.seed for s in each.samples] and each.metrics["first"] == 100 * each.key

    def test_four_processes_at_most(self):
        with Scorer([PLACE + "process"]) as scorer:
            found = {each.rewards[0, 0] for each in scorer.score(map(group, range(20)))}
            again = {each.rewards[0, 0] for each in scorer.score(map(group, range(4)))}
        assert len(found) <= 4 and again & found


def renamed(function, name):
    """Returns a callable of another name."""

    def called(**keywords):
        return function(**keywords)

    called.__name__ = name
    return called


@pytest.fixture(autouse=True)
def _log_level(caplog):
    caplog.set_level(logging.WARNING)
