"""Calls of reward functions: finds a function by its place, calls it as TRL does, and checks the numbers that it returns."""

import asyncio
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Scores(NamedTuple):
    """The result of a call: a reward of each sample, NaN for None, and all that the function logged."""

    rewards: list[float]
    extras: dict[str, list]
    metrics: dict[str, float]


def function_at(place: str) -> Function:
    """Imports "file.py:function" or "module:function". A function with verl's parameters is adapted by `from_verl`.

    Raises:
      ValueError: the file or module cannot be imported, or has no such function.
    """
    origin, _, name = place.rpartition(":")
    try:
        module = _module_of_file(Path(origin).expanduser().resolve()) if origin.endswith(".py") else import_module(origin)
    except Exception as error:  # of any kind, as the user's code raises it
        raise ValueError(f"{place!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(f"{origin} has no function or class {name!r}; it has {', '.join(found) or 'none'}")
    return (
        from_verl(function) if {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys() else function
    )


def missing_arguments(function: Function, given: Iterable[str]) -> list[str]:
    """Returns the parameters of a reward function that a call with these keywords would not set."""
    of_call = {*given, "log_extra", "log_metric"}
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return [each.name for each in needed if each.kind not in kinds and each.name not in of_call]


class BadRewards(ValueError):
    """A function returned something else than one finite number, or None, for each sample."""


class CallFailed(RuntimeError):
    """A function raised, or was ended at the time limit."""


def call(function: Function, arguments: Mapping[str, Any]) -> Scores:
    """Calls a plain function with the arguments that it accepts.

    Raises:
      BadRewards, CallFailed: see there.
    """
    logs = _Logs()
    try:
        found = function(**logs.keywords(function, arguments))
    except Exception as error:  # of any kind, as the user's code raises it
        raise CallFailed(_raised(error)) from error
    return logs.scores(found, len(arguments["completions"]))


async def call_async(function: Function, arguments: Mapping[str, Any], timeout: float) -> Scores:
    """Calls an `async` function, and cancels it after `timeout` seconds; otherwise as `call`."""
    logs = _Logs()
    try:
        async with asyncio.timeout(timeout) as limit:
            found = await function(**logs.keywords(function, arguments))
    except Exception as error:  # of any kind, as the user's code raises it
        ended = f"did not end within {timeout:g} s, and was cancelled"
        raise CallFailed(ended if limit.expired() else _raised(error)) from error
    return logs.scores(found, len(arguments["completions"]))


def _raised(error: Exception) -> str:
    """Returns the sentence about an error, with the line that raised it."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"raised {type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


class _Logs:
    """All that a function logs during one call."""

    def __init__(self) -> None:
        self.extras: dict[str, list] = {}
        self.metrics: dict[str, list[float]] = {}

    def keywords(self, function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = {**arguments, "log_extra": self._extra, "log_metric": self._metric}
        parameters = inspect.signature(function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return given
        return {name: value for name, value in given.items() if name in parameters}

    def scores(self, found: Any, num_samples: int) -> Scores:
        for column, values in self.extras.items():
            if len(values) != num_samples:
                raise BadRewards(f"logged {len(values)} values of {column!r}, not one of each of the {num_samples} samples")
        return Scores(_numbers(found, num_samples), self.extras, {name: fmean(each) for name, each in self.metrics.items()})

    def _extra(self, column: str, values: Sequence[Any]) -> None:
        self.extras[column] = list(values)

    def _metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(name, []).append(float(value))


def _numbers(found: Any, num_samples: int) -> list[float]:
    """Returns the rewards as floats, NaN for None. Accepts booleans, NumPy's numbers and arrays of no axis."""
    try:
        rewards = None if isinstance(found, str | bytes | Mapping) else list(found)
    except TypeError:
        rewards = None
    if rewards is None:
        raise BadRewards(f"returned {found!r:.80}, not a list with one number of each of the {num_samples} samples")
    if len(rewards) != num_samples:
        raise BadRewards(f"returned {len(rewards)} rewards for {num_samples} samples; it must return one of each, or None")
    return [math.nan if reward is None else _number(reward, i) for i, reward in enumerate(rewards)]


def _number(reward: Any, sample: int) -> float:
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRewards(f"returned {reward!r:.80} for sample {sample}; a reward is a finite number, or None for no reward")
    return number


def from_verl(compute_score: Function) -> Function:
    """Returns a reward function from verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    Rows need verl's columns. `solution_str` is the last answer of the model. If a result is a dictionary, its "score" is the
    reward, and other entries are logged as columns.
    """

    def results(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
        sources, models, infos = (columns.get(name) or [None] * len(completions) for name in VERL)
        for each, source, model, info in zip(completions, sources, models, infos, strict=True):
            row = {"data_source": source, "ground_truth": ground_truth(model), "extra_info": info}
            yield compute_score(solution_str=text_of(each), **row)

    def adapted(completions: Sequence[Any], log_extra: Function, **columns: Any) -> list[Any]:
        return _split(list(results(completions, columns)), log_extra)

    async def adapted_async(completions: Sequence[Any], log_extra: Function, **columns: Any) -> list[Any]:
        return _split(await asyncio.gather(*results(completions, columns)), log_extra)

    made: Function = adapted_async if inspect.iscoroutinefunction(compute_score) else adapted
    made.__name__ = compute_score.__name__
    return made


VERL = ("data_source", "reward_model", "extra_info")
"""Columns of verl's rows that its reward functions read."""


def ground_truth(reward_model: Any) -> Any:
    """Returns the wanted answer of a row with verl's column `reward_model`; None without one."""
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns a completion's text: for messages, the content of the assistant's last one."""
    if isinstance(completion, str):
        return completion
    return next((each["content"] or "" for each in reversed(completion) if each["role"] == "assistant"), "")


def _split(results: Sequence[Any], log_extra: Function) -> list[Any]:
    """Returns the scores of verl's results, and logs their other entries."""
    whole = [result if isinstance(result, Mapping) else {"score": result} for result in results]
    for column in dict.fromkeys(key for result in whole for key in result if key != "score"):
        log_extra(column, [result.get(column) for result in whole])
    return [result.get("score") for result in whole]


def _module_of_file(file: Path) -> Any:
    """Imports a file once. It can import its neighbors."""
    name = f"reward_file:{file}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
