"""Reads from the device the tokens that a step has drawn."""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from moe_jax.serving.device import Launched
from moe_jax.serving.sampling import Sampled
from moe_jax.serving.sequence import Sequence


class NewToken(NamedTuple):
    """A token that was drawn."""

    token: int
    logprob: float
    top_logprobs: dict[int, float] | None
    """The most likely tokens, if the request asks for some."""


def read_tokens(launched: Launched) -> list[list[NewToken]]:
    """Waits for the tokens of a step; returns for each of `samples` its token, and the one behind an accepted draft."""
    rows, samples = launched.rows, launched.samples
    found = [[token] for token in _tokens(launched.sampled, rows, samples)]
    if launched.second is not None:
        num = len(launched.plans[0].decodes)
        seconds, accepted = _tokens(launched.second, rows[:num], samples[:num]), np.asarray(launched.accepted).tolist()
        for tokens, second, row in zip(found, seconds, rows, strict=False):
            tokens += [second] if accepted[row] else []
    return found


def _tokens(sampled: Sampled, rows: list[int], samples: Many[Sequence]) -> list[NewToken]:
    tokens, logprobs, top_tokens, top_logprobs = (np.asarray(array)[rows] for array in sampled)
    found = []
    for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        tops = None
        if wanted := samples[i].options.logprobs:
            tops = dict(zip(top_tokens[i, :wanted].tolist(), top_logprobs[i, :wanted].tolist(), strict=True))
        found.append(NewToken(token, logprob, tops))
    return found
