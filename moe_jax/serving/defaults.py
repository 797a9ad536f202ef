"""A model's own sampling options and ends, for requests that name none."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.generation.text import text_options
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.request import SamplingOptions


class Defaults(NamedTuple):
    """A model's own options, where a request gives none."""

    sampling: dict[str, Any]
    """The fields of `SamplingOptions` that say how tokens are drawn."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""
    ends_of_answers: tuple[int, ...] = ()
    """Tokens that end an answer in a chat."""


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_defaults(source: str | Path | None, config: ModelConfig, tokenizer: Any, *, draws: bool = False) -> Defaults:
    """Returns the options in generation_config.json, as `text_options` reads them, and the tokens that end texts.

    Raises:
        ValueError: An option is out of its range.
    """
    none = dict.fromkeys(SAMPLING)
    found, answers = (text_options(source, config, tokenizer, none, answers=each, draws=draws) for each in (False, True))
    ends, ends_of_answers = (tuple(each.pop("eos_token_id")) for each in (found, answers))
    if problems := SamplingOptions(**found).problems(config.vocab_size):
        raise ValueError(f"generation_config.json: {'; '.join(problems)}")
    return Defaults(found, ends, ends_of_answers)


def fitted(options: SamplingOptions, prompt: list[int], limits: EngineLimits) -> SamplingOptions:
    """Returns options whose `max_new_tokens` fit after a prompt, at most those of `options`; 0 there means all that fit.

    At least 1, so that the engine names a prompt too long.
    """
    room = max(1, limits.longest_request - len(prompt))
    return replace(options, max_new_tokens=min(options.max_new_tokens or room, room))
