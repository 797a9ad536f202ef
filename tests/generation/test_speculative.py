"""Drafts change nothing but the number of passes, and as many are right as the module's predictions say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import moe_jax
from moe_jax.generation import Drafts, generate_with_drafts

PROMPTS = [[1, 2, 0, 3], [2], [3, 3, 1, 0, 1, 2, 2]]


def small_model():
    """Of four tokens: drafts are right by chance."""
    model = tiny.deepseek(mtp=1, layers=2, vocab_size=4)
    rng = np.random.default_rng()
    model.embed_tokens.weight[...] = jnp.asarray(rng.normal(0, 1, (4, 16)), jnp.float32)
    model.lm_head.weight[...] = jnp.asarray(rng.normal(0, 1, (4, 16)), jnp.float32)
    return model


def count_by_hand(model, prompts, outputs):
    """(drafted, accepted) of predictions made for whole sequences at once."""
    rows = [prompt + new for prompt, new in zip(prompts, outputs, strict=True)]
    tokens = jnp.asarray([row + [0] * (32 - len(row)) for row in rows])
    segments = jnp.asarray([[1] * len(row) + [0] * (32 - len(row)) for row in rows])

    @jax.jit
    def predictions():
        hidden = model.hidden_states(tokens, None, segments).hidden
        (further,) = model.further_hidden_states(hidden, tokens, None, segments)
        return (further.hidden @ model.head_weight.T).argmax(axis=-1)

    drafted = accepted = 0
    for row, prompt, predicted in zip(rows, prompts, np.asarray(predictions()), strict=True):
        i = len(prompt) - 1
        while i + 2 < len(row):
            right = predicted[i] == row[i + 2]
            drafted, accepted, i = drafted + 1, accepted + right, i + 1 + right
    return drafted, accepted


def test_the_tokens_are_those_without_drafts_and_the_right_drafts_those_of_the_module():
    options, drafts = dict(max_new_tokens=20, eos_token_id=3), Drafts(0, 0)
    while not 0 < drafts.accepted < drafts.drafted:  # a model that says one token again and again
        model = small_model()
        outputs, drafts = generate_with_drafts(model, PROMPTS, **options)
    assert outputs == moe_jax.generate(model, PROMPTS, **options)
    assert (drafts.drafted, drafts.accepted) == count_by_hand(model, PROMPTS, outputs)
    assert drafts.acceptance_rate == drafts.accepted / drafts.drafted


def test_a_model_without_such_a_module_and_bad_lengths_are_refused():
    with pytest.raises(ValueError, match="drafts need a model with a module that predicts further tokens"):
        generate_with_drafts(tiny.deepseek(), [1])
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1; got 0; eos_token_id 264 is outside"):
        generate_with_drafts(tiny.deepseek(mtp=1), [1], max_new_tokens=0, eos_token_id=264)
