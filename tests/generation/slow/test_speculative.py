"""Drafts change the number of passes, not the distribution of tokens; a draft is accepted if the module is right."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.generation import Drafts, generate_with_drafts
from moe_jax.generation.sampling import distribution
from moe_jax.generation.speculative import given_draft
from tests.helpers import seeds, tiny

PROMPTS = [[1, 2, 0, 3], [2], [3, 3, 1, 0, 1, 2, 2]]


def small_model():
    """Returns a model of four tokens, so that drafts are right by chance."""
    model = tiny.deepseek(mtp=1, layers=2, vocab_size=4)
    rng = seeds.rng()
    model.embed_tokens.weight[...] = jnp.asarray(rng.normal(0, 1, (4, 16)), jnp.float32)
    model.lm_head.weight[...] = jnp.asarray(rng.normal(0, 1, (4, 16)), jnp.float32)
    return model


def whole_sequences(model, tokens, segments=None):
    """Returns hidden states of the model and of the module."""
    hidden = model.hidden_states(tokens, None, segments).hidden
    (further,) = model.mtp_hidden_states(hidden, tokens, None, segments)
    return hidden, further.hidden


def count_by_hand(model, prompts, outputs):
    """(drafted, accepted) of predictions made for whole sequences at once."""
    rows = [prompt + new for prompt, new in zip(prompts, outputs, strict=True)]
    tokens = jnp.asarray([row + [0] * (32 - len(row)) for row in rows])
    segments = jnp.asarray([[1] * len(row) + [0] * (32 - len(row)) for row in rows])

    @jax.jit
    def predictions():
        _, further_hidden = whole_sequences(model, tokens, segments)
        return (further_hidden @ model.head_weight.T).argmax(axis=-1)

    drafted = accepted = 0
    for row, prompt, predicted in zip(rows, prompts, np.asarray(predictions()), strict=True):
        i = len(prompt) - 1
        while i + 2 < len(row):
            right = predicted[i] == row[i + 2]
            drafted, accepted, i = drafted + 1, accepted + right, i + 1 + right
    return drafted, accepted


@pytest.mark.parametrize("draws", [{}, pytest.param(dict(temperature=1.5, top_k=1), marks=pytest.mark.thorough)])
def test_greedy_tokens_equal_those_without_drafts(draws):
    """The counts of drafts equal a count by hand. A draw from the most likely token alone is greedy."""
    options, drafts = dict(max_new_tokens=20, eos_token_id=3), Drafts(0, 0)
    while not 0 < drafts.accepted < drafts.drafted:  # a model that repeats one token
        model = small_model()
        outputs, drafts = generate_with_drafts(model, PROMPTS, **options, **draws)
    assert outputs == moe_jax.generate(model, PROMPTS, **options)
    assert (drafts.drafted, drafts.accepted) == count_by_hand(model, PROMPTS, outputs)
    assert drafts.acceptance_rate == drafts.accepted / drafts.drafted


probabilities = st.lists(st.sampled_from([0, 0, 1e-30, 0.1, 1, 2, 7]), min_size=6, max_size=6).filter(any)
"""Of six tokens, up to a factor; many of them zero."""


@settings(deadline=None)
@given(probabilities, probabilities)
def test_tokens_follow_p_over_drafts_from_q(p, q):
    """A draft x is accepted with probability min(p, q) / q, so the overlap of p and q is accepted."""
    p, q = (np.asarray(weights, np.float32) / np.float32(sum(weights)) for weights in (p, q))
    drafts = np.flatnonzero(q)
    given_each = np.asarray(given_draft(*(jnp.tile(each, (6, 1)) for each in (p, q)), jnp.arange(6)))[drafts]
    np.testing.assert_allclose(given_each.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(q[drafts] @ given_each, p, atol=1e-6)
    accepted = q[drafts] * given_each[np.arange(len(drafts)), drafts]
    np.testing.assert_allclose(accepted, np.minimum(p, q)[drafts], rtol=1e-6)
    assert not given_each[:, p == 0].any()


def test_a_rejected_draft_survives_rounding():
    """Rounding leaves nothing of max(p - q, 0): a token of the model still replaces the rejected draft."""
    p, q = jnp.array([[0.0, 1.0, 0.0]]), jnp.array([[1e-30, 1.0, 0.0]])
    np.testing.assert_array_equal(given_draft(p, q, jnp.array([0])), p)


@pytest.mark.thorough
def test_sampled_tokens_have_the_models_frequencies():
    """4096 draws of three tokens follow the exact distribution. The counts of drafts follow the overlap of model and module."""
    # Its import takes a second.
    from scipy.stats import chi2

    model, prompt, sequences = small_model(), [1, 2, 0], 4096
    options = dict(temperature=4.0, top_k=3, top_p=0.95)
    new, drafts = generate_with_drafts(model, [prompt] * sequences, max_new_tokens=3, seed=fresh_seed(), **options)

    outcomes = np.asarray(list(itertools.product(range(4), repeat=3)))
    tokens = jnp.concatenate([jnp.tile(jnp.asarray(prompt), (64, 1)), outcomes], axis=1)
    hidden, further_hidden = jax.jit(lambda: whole_sequences(model, tokens))()
    p = distribution(hidden[:, 2:5] @ model.head_weight.T, **options).reshape(4, 4, 4, 3, 4)
    q = distribution(further_hidden[:, 2:4] @ model.head_weight.T, **options).reshape(4, 4, 4, 2, 4)
    # [t1], [t1, t2], [t1, t2, t3]: an outcome's later tokens do not change the tokens before them.
    first, second, third = p[0, 0, 0, 0], p[:, 0, 0, 1], p[:, :, 0, 2]
    of_outcome = np.asarray(first[:, None, None] * second[:, :, None] * third).reshape(64)
    drafted_second, drafted_third = q[:, 0, 0, 0], q[:, :, 0, 1]

    counts = np.bincount(np.asarray(new) @ [16, 4, 1], minlength=64)
    assert not counts[of_outcome == 0].any()
    # One cell joins all rare outcomes and the least frequent of the others: small expected counts are not normal variables.
    cell = np.maximum(np.argsort(np.argsort(of_outcome)) - (of_outcome * sequences < 40).sum(), 0)
    observed, expected = np.bincount(cell, counts), np.bincount(cell, of_outcome * sequences)
    assert ((observed - expected) ** 2 / expected).sum() < chi2.isf(1e-7, max(len(expected) - 1, 1))

    # An accepted second token brings the third along; a rejected second token is followed by another draft.
    rejected = first[:, None] * jnp.maximum(second - drafted_second, 0)
    agreed = 1 - rejected.sum() + (rejected[:, :, None] * jnp.minimum(third, drafted_third)).sum()
    six_deviations = 6 * np.sqrt(sequences / 4)
    assert abs(drafts.drafted - sequences * (1 + rejected.sum())) < six_deviations
    assert abs(drafts.accepted - sequences * agreed) < six_deviations


@pytest.mark.thorough
def test_draws_depend_on_seed_and_place_alone():
    """Longer neighbours and an end token change no token before the end."""
    model, seed = small_model(), fresh_seed()
    options = dict(max_new_tokens=16, temperature=8.0)
    free, _ = generate_with_drafts(model, PROMPTS, seed=seed, **options)
    assert free == generate_with_drafts(model, PROMPTS, seed=seed, **options)[0]
    assert free != generate_with_drafts(model, PROMPTS, seed=seed + 1, **options)[0]
    beside_a_long_one = [*PROMPTS[:2], [1, 2, 3] * 25]
    stopped, _ = generate_with_drafts(model, beside_a_long_one, seed=seed, eos_token_id=3, **options)
    for before, after in zip(free[:2], stopped[:2], strict=True):
        assert after == before[: before.index(3) + 1 if 3 in before else 16]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.thorough), dict(temperature=0.7, top_k=3, eos_token_id=3)],
    ids=["greedy", "drawn"],
)
def test_drafts_from_the_text_change_no_token(options):
    """Models without a module draft from the text, of prompts of several lengths; greedy ones repeat themselves."""
    model, options = tiny.dense(), dict(max_new_tokens=40, seed=fresh_seed(), **options)
    prompts = [[1, 2, 0, 3, 1, 2], [2], [3, 3, 1, 0, 1, 2, 2]]
    tokens, drafts = generate_with_drafts(model, prompts, drafts="lookup:3", **options)
    assert tokens == moe_jax.generate(model, prompts, **options)
    assert 0 <= drafts.accepted <= drafts.drafted
    assert "temperature" in options or drafts.acceptance_rate > 0.5


def fresh_seed() -> int:
    return seeds.integer()


def test_bad_options_and_models_without_a_module_are_refused():
    with pytest.raises(ValueError, match="drafts need a model loaded with its MTP modules"):
        generate_with_drafts(tiny.deepseek(), [1])
    model = tiny.deepseek(mtp=1)
    with pytest.raises(ValueError, match="max_new_tokens must be an integer, at least 1; got 0; eos_token_id 264 is outside"):
        generate_with_drafts(model, [1], max_new_tokens=0, eos_token_id=264)
    with pytest.raises(
        ValueError, match=r"temperature must be a number, 0 or more; got -1; top_k must be .* got 0; top_p must .* got 2"
    ):
        generate_with_drafts(model, [1], temperature=-1, top_k=0, top_p=2)
