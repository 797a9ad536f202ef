"""The scored groups of each step: drawn, scored as soon as each is complete, and kept in the journal."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_jax.recipes.grpo.prepare import PlannedGrpo
from moe_jax.reinforcement.advantages import kept_groups
from moe_jax.reinforcement.environments import play
from moe_jax.reinforcement.journal import Journal
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.prompts import prompt_at, seed_of
from moe_jax.reinforcement.samples import Group

Row = tuple[int, Mapping[str, Any]]
"""The key of a prompt, and its row of the data."""

MAX_WAVES = 4
"""Largest number of times that a step draws new prompts, until enough groups have spread."""


@dataclass(frozen=True)
class Rollout:
    """The groups that a step learns from, in the order of their prompts.

    Attributes:
      dropped: the number of groups that were drawn and left out, because their rewards were all equal.
      drawing: seconds until the last answer was complete, including rewards that were computed meanwhile.
      scoring: the seconds after that.
    """

    groups: list[Group]
    dropped: int
    drawing: float
    scoring: float


class Rollouts:
    """An iterator over the rollouts of a run, step by step.

    A killed run reads the groups in the journal, and never asks for their rewards again. In exact mode it draws the missing
    groups alone. Without exact bits log-probabilities depend on the requests that are computed together: it then queues all
    requests of an interrupted rollout again. It does so for complete rollouts of models with experts, because the update
    replays the experts that drew, and the journal does not keep them.
    """

    def __init__(self, plan: PlannedGrpo, policy: Policy, journal: Journal, step: int) -> None:
        self.settings, self.prompts, self.scorer = plan.settings, plan.prompts, plan.scorer
        self.environment, self.tokenizer = plan.environment, plan.tokenizer
        self.policy, self.journal, self.step, self.next_key = policy, journal, step, 0

    def __next__(self) -> Rollout:
        settings, step = self.settings, self.step + 1
        kept, drawn, seconds = list[Group](), list[Group](), np.zeros(2)
        for _ in range(1 if settings.policy.keep_groups == "all" else MAX_WAVES):
            first = self.next_key + len(drawn)
            keys = range(first, first + settings.prompts)
            groups, *of_wave = self.scored(step, [(key, prompt_at(self.prompts, key, settings.seed)) for key in keys])
            drawn, kept, seconds = drawn + groups, kept + kept_groups(groups, settings.policy), seconds + of_wave
            if len(kept) >= settings.prompts:
                break
        # The first groups, not the fastest. Without spread in any of them, a step changes no weight by its rewards.
        groups = (kept or drawn)[: settings.prompts]
        self.step, self.next_key = step, self.next_key + len(drawn)
        return Rollout(groups, len(drawn) - len(groups), *seconds.tolist())

    def scored(self, step: int, rows: Sequence[Row]) -> tuple[list[Group], float, float]:
        """Returns the scored group of each (key, row) in this order, and the seconds of drawing and of scoring."""
        settings, began, found = self.settings, time.perf_counter(), self.journal.groups(step)
        asked, drawn_at = [(key, row) for key, row in rows if key not in found], began
        if not settings.exact and (asked or self.policy.model.config.experts is not None):
            asked = list(rows)

        def unscored() -> Iterator[Group]:
            nonlocal drawn_at
            for group in self._drawn(asked, step):
                if (known := found.get(group.key)) is None:
                    yield group
                elif _has_bits_of(known, group):
                    found[group.key] = replace(group, rewards=known.rewards, extras=known.extras, metrics=known.metrics)
            drawn_at = time.perf_counter()

        for group in self.scorer.score(unscored() if asked else (), {"step": step, "steps": settings.steps}):
            self.journal.append(step, group)
            found[group.key] = group
        return [found[key] for key, _ in rows], drawn_at - began, time.perf_counter() - drawn_at

    def _drawn(self, rows: Sequence[Row], step: int) -> Iterator[Group]:
        """Yields the group of each row as soon as it is complete; with an environment, dialogues of all rows at once."""
        settings, policy = self.settings, self.policy
        if self.environment is None:
            yield from policy.sample(rows, step=step, seed=settings.seed)
            return
        options: dict[str, Any] = dict(max_new_tokens=settings.max_new_tokens, max_turns=settings.max_turns)
        with ThreadPoolExecutor(len(rows)) as threads:
            games = []
            for key, row in rows:
                seeds = [seed_of(settings.seed, step, key, i) for i in range(settings.samples)]
                given = key, row, self.environment, policy.draw, self.tokenizer
                games.append(threads.submit(play, *given, seeds=seeds, **options))
            yield from (game.result() for game in as_completed(games))

    def get_state(self) -> dict[str, int]:
        """Returns the position in the data."""
        return {"next_key": self.next_key}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a position."""
        self.next_key = state["next_key"]

    def close(self) -> None:
        """Ends the engine."""
        self.policy.close()


def _has_bits_of(known: Group, drawn: Group) -> bool:
    """Returns True if a group that is drawn again is that of the journal. If not, the journal's has the rewards."""
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(known.samples, drawn.samples, strict=True)
        for name in ("tokens", "log_probs")
    )
