"""What is asked of a model: prompts and options, all of them checked before anything is computed."""

import logging
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from moe_jax.checkpoint.companions import generation_config
from moe_jax.config import ModelConfig
from moe_jax.generation.prompts import as_prompts
from moe_jax.models.decoder import Decoder

_logger = logging.getLogger(__name__)

_warned_of: set[int] = set()
"""The lengths that models were trained for and that were said to be exceeded: once each in a process."""


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
    attention_mask: Any = None,
    padding_ids: Collection[int] = (),
) -> tuple[list[list[int]], bool, Options]:
    """The prompts as lists of ints, whether one flat prompt was given, and the options. Warns once of too long a sequence.

    Args:
      padding_ids: see `padding_ids`; the others are those of `generate`.

    Raises:
      ValueError: prompts that `as_prompts` refuses; or options outside their ranges, all of these at once.
    """
    prompts, single = as_prompts(prompt_tokens, config.vocab_size, attention_mask, padding_ids)
    ends = tuple(int(end) for end in np.atleast_1d([] if eos_token_id is None else eos_token_id))
    problems = []
    if not (isinstance(temperature, Real) and temperature >= 0):
        problems.append(f"temperature must be a number, 0 or more; got {temperature!r}")
    if top_k is not None and not (isinstance(top_k, Integral) and top_k >= 1):
        problems.append(f"top_k must be an integer, at least 1; got {top_k!r}")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        problems.append(f"top_p must be a number in (0, 1]; got {top_p!r}")
    if not (isinstance(max_new_tokens, Integral) and max_new_tokens >= 1):
        problems.append(f"max_new_tokens must be an integer, at least 1; got {max_new_tokens!r}")
    strangers = [end for end in ends if not 0 <= end < config.vocab_size]
    problems += [f"eos_token_id {end} is outside the vocabulary of {config.vocab_size}" for end in strangers]
    if problems:
        raise ValueError("; ".join(problems))
    _warn_of_length(config, max(map(len, prompts)), max_new_tokens)
    return prompts, single, Options(max_new_tokens, float(temperature), top_k, top_p, ends)


def padding_ids(model: Decoder) -> set[int]:
    """The tokens that tokenizers pad this model's prompts with, by its config.json and generation_config.json.

    Where neither names one, users pad with the end of a text.
    """
    config, beside = model.config, generation_config(model.source, model.config)
    named: set[Any] = {config.pad_token_id, beside.get("pad_token_id")} - {None}
    ends = [] if config.eos_token_id is None else np.atleast_1d(config.eos_token_id).tolist()
    return named or set(ends)


def _warn_of_length(config: ModelConfig, prompt: int, new: int) -> None:
    rope, limit = config.rope_parameters, config.max_position_embeddings
    if rope.factor and rope.original_max_position_embeddings:
        limit = max(limit, int(rope.factor * rope.original_max_position_embeddings))
    if prompt + new <= limit or rope.rope_type == "dynamic" or limit in _warned_of:
        return
    _warned_of.add(limit)
    _logger.warning(
        "a prompt of %d tokens and max_new_tokens=%d make %d, more than the model's max_position_embeddings of %d: text behind "
        "that position may make no sense",
        prompt, new, prompt + new, limit,
    )  # fmt: skip
