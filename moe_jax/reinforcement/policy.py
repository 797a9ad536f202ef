"""The policy: a model that draws answers and learns from them by turns, with one copy of its weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import optax

from moe_jax.models.decoder import Decoder
from moe_jax.reinforcement.samples import Group
from moe_jax.serving.request import EngineLimits
from moe_jax.train.state import TrainState

MAX_WAVES = 4
"""Largest number of times that `rollout` draws a step's prompts, until enough groups have spread."""


class Policy:
    """A model that draws groups of answers (`sample`) and learns from their rewards (`update`), by turns.

        policy = Policy(model, optimizer, settings, tokenizer=tokenizer, limits=limits)
        groups = score(policy.sample(rows, step=0, seed=0), [reward])
        metrics = policy.update(groups)

    The policy owns the model's arrays: `model` returns the model with the present weights. While `update` runs, the engine
    sleeps: its pages are freed.

    Args:
      model: the model, whose arrays are consumed by the first update.
      optimizer: an optax optimizer, such as `train.make_optimizer` returns.
      settings: the algorithm. Its `exact` decides whether the engine and the update compute equal bits.
      tokenizer: renders prompts, and decodes answers.
      limits: the engine's sizes.
      seq_len: tokens of a packed row of an update; default: the limits' `max_length`.
      rows: rows of a micro-batch of an update.
      on_mismatch: "stop" raises if the audit finds a token whose log-probability differs; "warn" logs it.

    Raises:
      ValueError: settings that the model does not support; the message names the field.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        settings: Any,
        *,
        tokenizer: Any,
        limits: EngineLimits | None = None,
        seq_len: int | None = None,
        rows: int = 1,
        on_mismatch: Literal["stop", "warn"] = "stop",
    ):
        raise NotImplementedError

    state: TrainState
    """The training state, for checkpoints."""

    @property
    def model(self) -> Decoder:
        """The model with the present weights, which the next update consumes."""
        raise NotImplementedError

    def sample(self, rows: Sequence[tuple[int, Mapping[str, Any]]], *, step: int, seed: int) -> Iterator[Group]:
        """Yields the group of each (key, row) as soon as all its answers are complete.

        Answers depend on weights, seed, step and key, not on the order of completion. If the caller stops early, the other
        requests are aborted.
        """
        raise NotImplementedError

    def update(self, groups: Iterable[Group]) -> dict[str, float]:
        """Takes one training step on scored groups, in any order; the engine then has the new weights. Returns metrics."""
        raise NotImplementedError

    def restore(self, state: TrainState) -> None:
        """Continues with a state of a checkpoint. The next update audits all of its rows."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the engine and frees its memory; `state` and `model` stay."""
        raise NotImplementedError
