"""A model's own sampling options and ends, for requests that name none."""

from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.generation.text import text_options
from moe_jax.serving.limits import EngineLimits


class Defaults(NamedTuple):
    """A model's own options, where a request gives none."""

    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]
    """Tokens that end a text."""
    ends_of_answers: tuple[int, ...]
    """Tokens that end an answer in a chat."""


def model_defaults(source: str | Path | None, config: ModelConfig, tokenizer: Any) -> Defaults:
    """Returns the options in generation_config.json, as `moe-jax generate` takes them, and the tokens that end texts."""
    none = dict.fromkeys(("temperature", "top_k", "top_p"))
    found, answers = (text_options(source, config, tokenizer, none, answers=answers) for answers in (False, True))
    sampling = found["temperature"], found["top_k"], found["top_p"]
    return Defaults(*sampling, ends=tuple(found["eos_token_id"]), ends_of_answers=tuple(answers["eos_token_id"]))


def room_behind(prompt: list[int], limits: EngineLimits) -> int:
    """Returns the number of tokens that fit behind a prompt; at least 1, so that the engine names a prompt too long."""
    return max(1, limits.longest_request - len(prompt))
