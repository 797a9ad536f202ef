"""Environments: dialogues in which the model calls tools, or plays a game, before it is rewarded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_jax.reinforcement.samples import Group, Sample

Draw = Callable[[list[int], int, int], Sample]
"""Draws an answer: draw(tokens of the prompt, seed, max_new_tokens). Its tokens include the end token."""


def play(
    key: int,
    row: Mapping[str, Any],
    environment: Callable[[], Any],
    draw: Draw,
    tokenizer: Any,
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    max_turns: int = 8,
) -> Group:
    """Returns the group of a prompt: one dialogue for each seed, all at once, each in an environment of its own."""
    raise NotImplementedError
