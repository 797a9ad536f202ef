"""Samples that a policy drew, in groups of one prompt, with the rewards of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    seed: int
    tokens: Int[np.ndarray, " answer"]
    log_probs: Float[np.ndarray, " answer"]
    own: Bool[np.ndarray, " answer"]
    finish_reason: str
    text: str
    weights_version: int = 0
    expert_ids: Integer[np.ndarray, "tokens layers choices"] | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one prompt.

    Attributes:
      key: the prompt's place in the run's order of prompts, counted over all epochs. It names the group's random numbers.
      row: the prompt's row of the data: `prompt`, a text or a list of messages, and the columns that rewards read.
      prompt_tokens: the prompt's tokens.
      samples: the answers, in the order of their seeds.
      rewards: the reward of each sample by each function; NaN where a function left the sample out. None before scoring.
    """

    key: int
    row: Mapping[str, Any]
    prompt_tokens: Int[np.ndarray, " prompt"]
    samples: tuple[Sample, ...]
    rewards: Float[np.ndarray, "samples functions"] | None = None
