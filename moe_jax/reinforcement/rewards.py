"""Rewards: functions that score the answers of a group, called safely."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe_jax.reinforcement.samples import Group


@dataclass(frozen=True)
class Reward:
    """A reward function.

    Attributes:
      name: the function's `__name__`, which names its metrics.
      function: the function.
      place: where a process imports it from, "file.py:function" or "module:function"; None for a callable.
    """

    name: str
    function: Callable[..., Any]
    place: str | None = None


def load_reward(reward: str | Callable[..., Any] | Reward) -> Reward:
    """Returns a reward function by its place ("file.py:function", "module:function"), ready name, or as given."""
    raise NotImplementedError


class Scorer:
    """Scores groups as they come. Close it, or use it in a `with` block.

    Attributes:
      names: the names of the functions, in the order of `Group.rewards`' columns.
    """

    names: tuple[str, ...]

    def __init__(
        self,
        rewards: Iterable[str | Callable[..., Any] | Reward],
        *,
        environment: str | None = None,
        reward_timeout: float = 300.0,
        on_reward_error: Literal["stop", "none"] = "stop",
    ):
        raise NotImplementedError

    def score(self, groups: Iterable[Group], trainer_state: Any = None) -> Iterator[Group]:
        """Yields each group with its rewards as soon as it has them all."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the processes."""

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def score(groups: Iterable[Group], rewards: Iterable[str | Callable[..., Any] | Reward], **options: Any) -> list[Group]:
    """Returns the groups with their rewards, in the order given; `options` are those of `Scorer`."""
    raise NotImplementedError


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., list[float | None]]:
    """Returns a reward function from verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`."""
    raise NotImplementedError
