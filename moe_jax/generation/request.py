"""What is asked of a model: prompts and options, all of them checked before anything is computed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.config import ModelConfig
from moe_jax.generation.prompts import as_prompts


class Options(NamedTuple):
    """Of a decoding loop, and of what is compiled for it. A sequence ends with one of `ends`, if there are any."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]


def checked_request(
    config: ModelConfig,
    prompt_tokens,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | Sequence[int] | None,
) -> tuple[list[list[int]], bool, Options]:
    """The prompts as lists of ints, whether one flat prompt was given, and the options. Arguments are those of `generate`.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, or options outside their ranges, all of these at once.
    """
    prompts, single = as_prompts(prompt_tokens, config.vocab_size)
    ends = tuple(int(end) for end in np.atleast_1d([] if eos_token_id is None else eos_token_id))
    problems = []
    if not temperature >= 0:
        problems.append(f"temperature must be 0 or more; got {temperature}")
    if top_k is not None and top_k < 1:
        problems.append(f"top_k must be at least 1; got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(f"top_p must lie in (0, 1]; got {top_p}")
    if max_new_tokens < 1:
        problems.append(f"max_new_tokens must be at least 1; got {max_new_tokens}")
    strangers = [end for end in ends if not 0 <= end < config.vocab_size]
    problems += [f"eos_token_id {end} is outside the vocabulary of {config.vocab_size}" for end in strangers]
    if problems:
        raise ValueError("; ".join(problems))
    return prompts, single, Options(max_new_tokens, float(temperature), top_k, top_p, ends)
