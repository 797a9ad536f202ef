"""Samples that a policy drew, in groups of one prompt, with the rewards of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to a prompt, as the model drew it.

    Attributes:
      seed: the seed that draws the answer again.
      tokens: all tokens after the prompt. In a dialogue with tools they include the tools' messages.
      log_probs: the log-probability of each token when it was drawn, at the sampling temperature; 0 for tools' tokens.
      own: True for the tokens that the model drew, False for tools' messages.
      finish_reason: `stop`, `length`, `abort` or `error`, as in `serving.Completion`.
      text: the answer as rewards read it, without special tokens.
      weights_version: the number of weight updates before the sample was drawn.
      expert_ids: the experts of each position of prompt and answer in each layer of experts, or None if none were kept.
      turns: the messages after the prompt of a dialogue in an environment: answers and messages of tools. None elsewhere.
      reward: the environment's own reward, if it has one.
      tool_calls, tool_failures: the number of calls of tools in a dialogue, and of those that raised an error.
    """

    seed: int
    tokens: Int[np.ndarray, " answer"]
    log_probs: Float[np.ndarray, " answer"]
    own: Bool[np.ndarray, " answer"]
    finish_reason: str
    text: str
    weights_version: int = 0
    expert_ids: Integer[np.ndarray, "tokens layers choices"] | None = None
    turns: Sequence[Mapping[str, Any]] | None = None
    reward: float | None = None
    tool_calls: int = 0
    tool_failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one prompt.

    Attributes:
      key: the prompt's place in the run's order of prompts, counted over all epochs. It names the group's random numbers.
      row: the prompt's row of the data: `prompt`, a text or a list of messages, and the columns that rewards read.
      prompt_tokens: the prompt's tokens.
      samples: the answers, in the order of their seeds.
      rewards: the reward of each sample by each function; NaN where a function left the sample out. None before scoring.
      extras: columns that rewards logged with `log_extra`, with a value of each sample.
      metrics: numbers that rewards logged with `log_metric`; the mean of several.
    """

    key: int
    row: Mapping[str, Any]
    prompt_tokens: Int[np.ndarray, " prompt"]
    samples: tuple[Sample, ...]
    rewards: Float[np.ndarray, "samples functions"] | None = None
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
