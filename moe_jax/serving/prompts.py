"""Log-probabilities of prompts: of each token given the tokens before it, and of the most likely tokens there.

A separate program reads the hidden states of a step in pieces of fixed size, since the logits of all tokens would need
gigabytes. A piece may hold tokens of several prompts.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from moe_jax.serving.placement import on_each
from moe_jax.serving.request import MAX_LOGPROBS
from moe_jax.serving.sampling import Scores, scores_of
from moe_jax.serving.schedule import Sequence, StepPlan
from moe_jax.serving.weights import logits_of

PIECE_TOKENS = 256
"""Tokens whose logits exist at the same time."""


PromptScores = tuple[list[tuple[Sequence, list[int]]], list[Scores]]
"""Tokens of prompts, in order, following those that earlier steps scored; and pieces of their scores."""


def score_prompts(
    plans: list[StepPlan],
    firsts: list[int],
    hidden: Float[Array, "tokens hidden"],
    head: Float[Array, "vocab hidden"],
    *,
    strict: bool = False,
    mesh: Mesh | None = None,
) -> PromptScores:
    """Starts to score the prompt tokens that follow the tokens of a step's chunks, if requests ask for it.

    Scored tokens are not scored again when a preempted sequence recomputes its prompt.

    Args:
      plans: one for each device.
      firsts: the index in `hidden` of the first token of each plan's first chunk.
      strict: as in `scores_of`.
      mesh: of the engine's devices, if there are several.
    """
    spans: list[tuple[Sequence, list[int]]] = []
    places: list[int] = []
    for plan, first in zip(plans, firsts, strict=True):
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + len(chunk.tokens)
            start = max(chunk.start + 1, sequence.num_scored)
            if sequence.scores_prompt and (tokens := sequence.prompt[start : end + 1]):
                spans.append((sequence, tokens))
                # A token's hidden state predicts the next token.
                begin = first + start - 1 - chunk.start
                places += range(begin, begin + len(tokens))
                sequence.num_scored = start + len(tokens)
            first += len(chunk.tokens)
    targets = [token for _, tokens in spans for token in tokens]
    padded = np.zeros((2, math.ceil(len(places) / PIECE_TOKENS) * PIECE_TOKENS), np.int32)
    padded[:, : len(places)] = places, targets
    cut = padded.reshape(2, -1, PIECE_TOKENS).swapaxes(0, 1)
    pieces = [score_piece(hidden, head, *piece, strict=strict, mesh=mesh) for piece in cut]
    for array in jax.tree.leaves(pieces):
        array.copy_to_host_async()
    return spans, pieces


def read_scores(scores: PromptScores) -> list[tuple[Sequence, list[dict[int, float]]]]:
    """Waits for the scores; returns for each span {token: log-probability} of each token, with its alternatives."""
    spans, pieces = scores
    if not spans:
        return []
    logprobs, top_tokens, top_logprobs = (np.concatenate(arrays).tolist() for arrays in zip(*pieces, strict=True))
    found, row = [], 0
    for sequence, tokens in spans:
        wanted, dicts = sequence.options.prompt_logprobs, []
        for token in tokens:
            tops = dict(zip(top_tokens[row][:wanted], top_logprobs[row][:wanted], strict=True))
            dicts.append({token: logprobs[row]} | tops)
            row += 1
        found.append((sequence, dicts))
    return found


def score_piece(
    hidden: Float[Array, "tokens hidden"],
    head: Float[Array, "vocab hidden"],
    places: Int[Array, "rows"],
    targets: Int[Array, "rows"],
    *,
    strict: bool = False,
    mesh: Mesh | None = None,
) -> Scores:
    """Returns the scores of `targets` as successors of the tokens at `places`."""
    num_top = min(MAX_LOGPROBS, len(head))
    if mesh is None:
        return piece_scores(_taken(hidden, places), head, targets, num_top, strict=strict)
    taken, scores = _programs_on(mesh, num_top, strict)
    return scores(taken(hidden, places), head, targets)


# Separate from the scores, which are then compiled only once: step shapes differ in their number of tokens.
@jax.jit
def _taken(hidden: Float[Array, "tokens hidden"], places: Int[Array, "rows"]) -> Float[Array, "rows hidden"]:
    return hidden[places]


@cache
def _programs_on(mesh: Mesh, num_top: int, strict: bool) -> tuple[Callable, Callable]:
    """Returns `_taken` and `piece_scores` for several devices, which all compute the same: XLA cannot split the kernels."""
    whole = PartitionSpec()
    scores = on_each(mesh, partial(piece_scores, num_top=num_top, strict=strict), whole, whole)
    return jax.jit(_taken, out_shardings=NamedSharding(mesh, whole)), jax.jit(scores)


@partial(jax.jit, static_argnames=("num_top", "strict", "temperature"))
def piece_scores(
    hidden: Float[Array, "rows hidden"],
    head: Float[Array, "vocab hidden"],
    targets: Int[Array, "rows"],
    num_top: int,
    *,
    strict: bool = False,
    temperature: float = 1.0,
) -> Scores:
    """Returns the scores of `targets` after tokens with these hidden states, and of the `num_top` most likely tokens.

    They are computed from logits / temperature.
    """
    logits = logits_of(hidden, head, strict=strict)
    if temperature != 1:
        # XLA would multiply by the inverse of a constant, and the bits would differ from an engine's draws.
        logits = logits / jax.lax.optimization_barrier(jnp.float32(temperature))
    return scores_of(logits, targets, num_top, strict=strict)
