"""Log-probabilities of prompts: of each token behind those before it, and of the most likely ones there.

A program of its own reads the hidden states of a step, a piece of fixed size at a time. The logits of all tokens of a step
would take gigabytes. A piece may hold tokens of several prompts, one behind the other.
"""

import math
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.serving.request import MAX_LOGPROBS
from moe_jax.serving.sampling import Scores, scores_of
from moe_jax.serving.schedule import Sequence, StepPlan
from moe_jax.serving.weights import logits_of

PIECE_TOKENS = 256
"""Tokens whose logits exist at the same time."""


PromptScores = tuple[list[tuple[Sequence, list[int]]], list[Scores]]
"""Tokens of prompts, in order, which follow the ones that steps before have scored; and pieces of their scores."""


def score_prompts(
    plans: list[StepPlan],
    firsts: list[int],
    hidden: Float[Array, "tokens hidden"],
    head: Float[Array, "vocab hidden"],
    *,
    strict: bool = False,
) -> PromptScores:
    """Starts to score the prompt tokens that follow the tokens of a step's chunks, where requests ask for it.

    A token that was scored is not scored again: a preempted sequence computes its prompt a second time.

    Args:
      plans: of each device.
      firsts: the index in `hidden` of the first token of each plan's first chunk.
      strict: as of `scores_of`.
    """
    spans: list[tuple[Sequence, list[int]]] = []
    places: list[int] = []
    for plan, first in zip(plans, firsts, strict=True):
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + len(chunk.tokens)
            start = max(chunk.start + 1, sequence.num_scored)
            if sequence.scores_prompt and (tokens := sequence.prompt[start : end + 1]):
                spans.append((sequence, tokens))
                # The state of a token says what follows it.
                begin = first + start - 1 - chunk.start
                places += range(begin, begin + len(tokens))
                sequence.num_scored = start + len(tokens)
            first += len(chunk.tokens)
    targets = [token for _, tokens in spans for token in tokens]
    padded = np.zeros((2, math.ceil(len(places) / PIECE_TOKENS) * PIECE_TOKENS), np.int32)
    padded[:, : len(places)] = places, targets
    pieces = [score_piece(hidden, head, *piece, strict=strict) for piece in padded.reshape(2, -1, PIECE_TOKENS).swapaxes(0, 1)]
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
) -> Scores:
    """Returns the scores of `targets` behind the tokens at `places`."""
    return piece_scores(_taken(hidden, places), head, targets, min(MAX_LOGPROBS, len(head)), strict=strict)


# Apart from the scores, which are compiled once: each shape of a step has another number of tokens.
@jax.jit
def _taken(hidden: Float[Array, "tokens hidden"], places: Int[Array, "rows"]) -> Float[Array, "rows hidden"]:
    return hidden[places]


@partial(jax.jit, static_argnames=("num_top", "strict"))
def piece_scores(
    hidden: Float[Array, "rows hidden"],
    head: Float[Array, "vocab hidden"],
    targets: Int[Array, "rows"],
    num_top: int,
    *,
    strict: bool = False,
) -> Scores:
    """Returns the scores of `targets` behind tokens with these hidden states, and of the `num_top` most likely tokens."""
    return scores_of(logits_of(hidden, head, strict=strict), targets, num_top, strict=strict)
