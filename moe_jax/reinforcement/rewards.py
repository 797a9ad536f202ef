"""Rewards: scores the answers of each group as soon as it is complete, by functions with TRL's signature.

    def correct(completions, answer, **columns) -> list[float | None]: ...

A function is called once for a group, with all its samples. None leaves a sample out. It may name all of
these keywords or some:

    prompts, completions                            a value of each sample: texts, or lists of messages for chats
    completion_ids, finish_reasons, seeds           a value of each sample
    answer, ...                                     each column of the data, with a value of each sample
    trainer_state                                   the argument of `Scorer.score`
    log_extra(column, values), log_metric(name, value)
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_jax.reinforcement import ready_rewards
from moe_jax.reinforcement.advantages import has_failed
from moe_jax.reinforcement.reward_calls import (
    BadRewards,
    CallFailed,
    Function,
    Scores,
    call,
    call_async,
    function_at,
    missing_arguments,
)
from moe_jax.reinforcement.reward_processes import Processes
from moe_jax.reinforcement.samples import Group, Sample

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reward:
    """A reward function.

    Attributes:
      name: the function's `__name__`, which names its metrics.
      function: the function, plain or `async`.
      place: "file.py:function" or "module:function", from which processes import it; None for a callable.
    """

    name: str
    function: Function
    place: str | None = None

    @property
    def is_async(self) -> bool:
        """True if a call returns a coroutine."""
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))


def load_reward(reward: str | Function | Reward) -> Reward:
    """Returns a reward function by "file.py:function", "module:function", the name of a ready one, or as given.

    Raises:
      ValueError: there is no such function, or it cannot be imported.
    """
    if isinstance(reward, Reward):
        return reward
    if isinstance(reward, str):
        place = f"{ready_rewards.__name__}:{reward}" if reward in ready_rewards.READY else reward
        if ":" not in place:
            raise ValueError(
                f"reward {reward!r} must be file.py:function, module:function, or one of {', '.join(ready_rewards.READY)}"
            )
        return Reward(place.rpartition(":")[2], function_at(place), place)
    if not callable(reward):
        raise ValueError(f"a reward must be a function, or the place of one; got {reward!r:.80}")
    inner = getattr(reward, "func", reward)
    return Reward(getattr(inner, "__name__", type(inner).__name__), reward)


class Scorer:
    """Scores groups as they come. Close it, or use it in a `with` block.

    Functions given by their place run in up to 4 processes, and are killed after the time limit. Callables run in the thread
    that iterates `score`, and `async` functions together in one event loop.

    Args:
      rewards: the functions, as `load_reward` accepts them.
      environment: the name of an environment with rewards of its own (`Sample.reward`), which are the last column.
      reward_timeout: time limit of a call in seconds. Nothing can end a callable that hangs: a warning names it.
      on_reward_error: "stop", or "none": a function that raises, or is killed, leaves the group's samples out.

    Attributes:
      names: the name of each column of `Group.rewards`.

    Raises:
      ValueError: no reward, two of one name, a function that cannot be imported, or an option outside its range.
    """

    def __init__(
        self,
        rewards: Iterable[str | Function | Reward],
        *,
        environment: str | None = None,
        reward_timeout: float = 300.0,
        on_reward_error: Literal["stop", "none"] = "stop",
    ):
        if not reward_timeout > 0:
            raise ValueError(f"reward_timeout must be greater than 0 seconds; got {reward_timeout!r}")
        if on_reward_error not in ("stop", "none"):
            raise ValueError(f"on_reward_error must be stop or none; got {on_reward_error!r}")
        self.rewards = tuple(map(load_reward, rewards))
        self.environment, self.timeout, self.on_error = environment, reward_timeout, on_reward_error
        self.names = (*(reward.name for reward in self.rewards), *([environment] if environment else []))
        if not self.names:
            raise ValueError("rewards must hold at least one function; got none")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"rewards must have different names, which name their metrics; got {', '.join(self.names)}")
        self._processes = Processes(reward_timeout)
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuses functions that cannot be called with a row's columns. Calls the ready ones with a made-up answer.

        Raises:
          ValueError: a function has a parameter that is no column, or a ready one raises.
        """
        empty: dict[str, Any] = dict(tokens=np.zeros(1, np.int32), log_probs=np.zeros(1), own=np.ones(1, bool))
        sample = Sample(seed=0, finish_reason="stop", text="-", **empty)
        group = Group(key=0, row=row, prompt_tokens=np.zeros(1, np.int32), samples=(sample,))
        arguments = _arguments(group, [0], None)
        for reward in self.rewards:
            if missing := missing_arguments(reward.function, arguments):
                raise ValueError(
                    f"the reward function {reward.name} needs {', '.join(missing)}; the data has the columns {', '.join(row)}"
                )
            if reward.function.__module__ == ready_rewards.__name__:
                try:
                    call(reward.function, arguments)
                except CallFailed as error:
                    raise ValueError(f"the reward function {reward.name} {error}") from error

    def score(self, groups: Iterable[Group], trainer_state: Any = None) -> Iterator[Group]:
        """Yields each group with its rewards as soon as it has them, in any order.

        Samples whose finish reason is `abort` or `error` are not shown to functions, and have no reward.

        Args:
          trainer_state: passed to the functions.

        Raises:
          RuntimeError: a function raised or was killed, and `on_reward_error` is "stop".
          ValueError: a function returned something else than one finite number, or None, for each sample.
        """
        begun: list[_Begun] = []
        try:
            for group in groups:
                begun.append(self._begin(group, trainer_state))
                yield from self._scored(begun)
            while begun:
                wait([future for each in begun for future in each.calls.values() if not future.done()], None, FIRST_COMPLETED)
                yield from self._scored(begun)
        finally:
            for each in begun:
                for future in each.calls.values():
                    future.cancel()

    def close(self) -> None:
        """Ends the processes and the event loop. Calls that still run are killed, or cancelled."""
        self._processes.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_cancel_all, self._loop)
            self._loop = None

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, group: Group, trainer_state: Any) -> "_Begun":
        present = [i for i, sample in enumerate(group.samples) if not has_failed(sample)]
        begun = _Begun(group, present, {})
        # Functions of this thread come last: the others run meanwhile.
        for reward in sorted(self.rewards if present else (), key=lambda each: each.place is None and not each.is_async):
            begun.calls[reward.name] = self._call(reward, _arguments(group, present, trainer_state))
        return begun

    def _call(self, reward: Reward, arguments: Mapping[str, Any]) -> "Future[Scores]":
        if reward.is_async:
            return asyncio.run_coroutine_threadsafe(call_async(reward.function, arguments, self.timeout), self._running_loop())
        if reward.place is not None:
            return self._processes.submit(reward.place, arguments)
        future = Future[Scores]()
        hangs = "the reward function %s has run for %g s, and nothing can end it here: give it as file.py:function"
        watchdog = threading.Timer(self.timeout, _logger.warning, (hangs, reward.name, self.timeout))
        watchdog.start()
        try:
            future.set_result(call(reward.function, arguments))
        except (BadRewards, CallFailed) as error:
            future.set_exception(error)
        finally:
            watchdog.cancel()
        return future

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="rewards", daemon=True).start()
        return self._loop

    def _scored(self, begun: list["_Begun"]) -> Iterator[Group]:
        """Yields the groups that have all rewards, and removes them from the list; raises the errors of all."""
        for each in begun:
            for name, future in each.calls.items():
                error = future.exception() if future.done() else None
                if isinstance(error, BadRewards) or (error is not None and self.on_error == "stop"):
                    kind = ValueError if isinstance(error, BadRewards) else RuntimeError
                    raise kind(f"the reward function {name} {error}; {_described(each)}") from error
        done = [all(future.done() for future in each.calls.values()) for each in begun]
        ready = [each for each, is_done in zip(begun, done, strict=True) if is_done]
        begun[:] = [each for each, is_done in zip(begun, done, strict=True) if not is_done]
        yield from map(self._with_rewards, ready)

    def _with_rewards(self, begun: "_Begun") -> Group:
        group, present = begun.group, begun.present
        rewards = np.full((len(group.samples), len(self.names)), np.nan)
        extras: dict[str, list] = {}
        metrics: dict[str, float] = {}
        for name, future in begun.calls.items():
            if (error := future.exception()) is not None:
                _logger.warning("the reward function %s %s, and is left out of %s", name, error, _described(begun))
                continue
            scores = future.result()
            rewards[present, self.names.index(name)] = scores.rewards
            metrics |= scores.metrics
            for column, values in scores.extras.items():
                of_sample = dict(zip(present, values, strict=True))
                extras[column] = [of_sample.get(i) for i in range(len(group.samples))]
        if self.environment:
            rewards[:, -1] = [np.nan if sample.reward is None else sample.reward for sample in group.samples]
        return replace(group, rewards=rewards, extras=extras, metrics=metrics)


def score(groups: Iterable[Group], rewards: Iterable[str | Function | Reward], **options: Any) -> list[Group]:
    """Returns the groups with their rewards, in the order of their keys, with the options and errors of `Scorer`."""
    with Scorer(rewards, **options) as scorer:
        return sorted(scorer.score(groups), key=lambda group: group.key)


class _Begun(NamedTuple):
    """A group with its calls by name, and the numbers of the samples that the functions see."""

    group: Group
    present: list[int]
    calls: "dict[str, Future[Scores]]"


def _arguments(group: Group, present: list[int], trainer_state: Any) -> dict[str, Any]:
    """Returns the keywords of a call. Each sample has values of its own, which a function may change."""
    samples = [group.samples[i] for i in present]
    columns = {name: [deepcopy(value) for _ in samples] for name, value in group.row.items()}
    prompts = columns.pop("prompt")
    is_chat = not isinstance(group.row["prompt"], str)
    return columns | {
        "prompts": prompts,
        "completions": [_completion(sample, is_chat) for sample in samples],
        "completion_ids": [sample.tokens.tolist() for sample in samples],
        "finish_reasons": [sample.finish_reason for sample in samples],
        "seeds": [sample.seed for sample in samples],
        "trainer_state": trainer_state,
    }


def _completion(sample: Sample, is_chat: bool) -> str | list[dict[str, Any]]:
    if sample.turns is not None:
        return [deepcopy(dict(turn)) for turn in sample.turns]
    return [{"role": "assistant", "content": sample.text}] if is_chat else sample.text


def _described(begun: _Begun) -> str:
    answers = [f"{i}: {begun.group.samples[sample].text!r:.200}" for i, sample in enumerate(begun.present)]
    return f"prompt {begun.group.key}: {begun.group.row['prompt']!r:.400}; answers {'; '.join(answers)}"


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Ends a loop from within, once its tasks are cancelled."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: loop.stop())
