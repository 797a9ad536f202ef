"""Rows are drawn by their own options and seeds, from the distributions of `generate` and of transformers' processors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.generation import sampling as generation
from moe_jax.serving.request import SMALLEST
from moe_jax.serving.sampling import (
    SlotOptions,
    _restricted,
    count_tokens,
    init_penalties,
    init_slots,
    penalised,
    penalty_row,
    sample_rows,
    slot_row,
    start_slot,
    variant_of,
    with_last_tokens,
)
from tests.helpers import seeds

ROWS, VOCAB = 6, 97

PLAIN = dict(temperature=0.0, top_k=None, top_p=None, min_p=None)
PENALTIES = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, logprobs=None)

sample = jax.jit(sample_rows, static_argnums=0, static_argnames="tempered")
restricted, changed, start, count = map(jax.jit, (_restricted, penalised, start_slot, count_tokens))


def run(*arguments, variant="full", penalties=None, **options):
    sampled, _ = sample(variant, *arguments, penalties, **options)
    return sampled


def given(**options) -> SimpleNamespace:
    return SimpleNamespace(**PLAIN | PENALTIES | options)


def slots_with(rows: list[SimpleNamespace], seed_numbers=None) -> SlotOptions:
    """Options of slots, one for each of `rows`."""
    numbers = range(len(rows)) if seed_numbers is None else seed_numbers
    made = [slot_row(options, seed) for options, seed in zip(rows, numbers, strict=True)]
    return jax.tree.map(lambda *values: jnp.stack(values), *made)


def normal(rng, *shape):
    return jnp.asarray(3 * rng.normal(size=shape), jnp.float32)


RESTRICTIONS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=VOCAB),
    dict(top_p=0.3),
    dict(top_p=0.95),
    dict(top_k=9, top_p=0.8),
    dict(top_p=1e-6),
]


@pytest.mark.parametrize("ties", [False, True])
def test_rows_are_cut_as_generate_cuts_a_batch(rng, ties):
    logits = normal(rng, len(RESTRICTIONS), VOCAB)
    logits = jnp.round(logits) if ties else logits
    temperatures = rng.uniform(0.3, 2, len(RESTRICTIONS)).tolist()
    options = slots_with([given(temperature=t, **each) for t, each in zip(temperatures, RESTRICTIONS, strict=True)])
    scores = restricted(logits / options.temperature[:, None], options)
    for row, (temperature, each) in enumerate(zip(temperatures, RESTRICTIONS, strict=True)):
        expected = generation.distribution(logits[row], temperature=temperature, **each)
        np.testing.assert_allclose(jax.nn.softmax(scores[row]), expected, rtol=2e-5, atol=1e-9)


def test_extreme_options_draw_as_their_neighbours(rng):
    """They pass the check of a request, and reach the device as f32 and int32."""
    logits = jnp.tile(20 + normal(rng, VOCAB), (3, 1))
    rows = given(temperature=1.2e-38), given(temperature=1.0, top_k=2**63), given(temperature=1.0, top_p=SMALLEST)
    found = run(logits, jnp.arange(3), jnp.arange(3), slots_with(rows))
    plain = run(logits, jnp.arange(3), jnp.arange(3), slots_with([given(temperature=1.0)] * 3))
    assert found.tokens.tolist() == [logits[0].argmax(), plain.tokens[1], logits[0].argmax()]


def test_min_p_cuts_tokens_far_less_likely_than_the_best():
    logits = jnp.log(jnp.array([[0.3, 0.4, 0.09, 0.2, 0.01]]))
    for min_p, kept in [(0.0, 5), (0.1, 4), (0.4, 3), (0.6, 2), (0.9, 1)]:
        options = slots_with([given(temperature=1.0, min_p=min_p)])
        assert jnp.isfinite(restricted(logits, options)).sum() == kept


def test_a_row_draws_as_generate_with_the_same_key(rng):
    logits = normal(rng, ROWS, VOCAB)
    rows = [given(temperature=0.7, **each) for each in RESTRICTIONS[:ROWS]]
    positions = jnp.arange(ROWS) + 5
    tokens = run(logits, jnp.arange(ROWS), positions, slots_with(rows)).tokens
    for row in range(ROWS):
        key = jax.random.fold_in(jax.random.key(row, impl="threefry2x32"), row + 5)[None]
        assert tokens[row] == generation.sample(logits[row : row + 1], key, temperature=0.7, **RESTRICTIONS[row])[0]


def test_a_draw_depends_on_its_seed_and_position_alone(rng):
    logits = jnp.zeros((4, 1000))
    rows = slots_with([given(temperature=1.0)] * 3, [2**40 + 1, 2**40 + 1, 1])
    tokens = run(logits, jnp.array([0, 1, 2, 0]), jnp.array([3, 3, 3, 4]), rows, variant="plain").tokens
    assert tokens[0] == tokens[1] and len({*tokens.tolist()}) == 3
    other = slots_with([given(temperature=0.5, top_k=3), given(temperature=1.0)], [9, 2**40 + 1])
    again = run(normal(rng, 2, 1000).at[1].set(0), jnp.array([0, 1]), jnp.array([8, 3]), other).tokens
    assert again[1] == tokens[0]


def test_variants_agree_and_greedy_rows_take_the_argmax(rng):
    logits = normal(rng, ROWS, VOCAB)
    rows = slots_with([given(temperature=(row % 2) * 0.8) for row in range(ROWS)])
    at = jnp.arange(ROWS), jnp.arange(ROWS)
    greedy, plain, full = (run(logits, *at, rows, variant=each) for each in ("greedy", "plain", "full"))
    np.testing.assert_array_equal(plain.tokens, full.tokens)
    np.testing.assert_array_equal(greedy.tokens, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(greedy.tokens[::2], full.tokens[::2])
    np.testing.assert_array_equal(greedy.logprobs, jax.nn.log_softmax(logits).max(axis=-1))


@pytest.mark.parametrize(
    "options, variant",
    [({}, "greedy"), ({"top_k": 3}, "greedy")]
    + [(dict(temperature=1.0) | each, "full" if each else "plain") for each in (*RESTRICTIONS[:2], {"min_p": 0.1})],
)
def test_the_smallest_variant_is_chosen(options, variant):
    assert variant_of(given(**options)) == variant


def test_log_probabilities_are_the_models(rng):
    logits = normal(rng, 2, VOCAB)
    penalties = init_penalties(2, VOCAB)._replace(in_prompt=jnp.ones((2, VOCAB), bool))
    penalties = penalties._replace(repetition=jnp.full(2, 1.3))
    found = run(logits, jnp.arange(2), jnp.arange(2), slots_with([given(temperature=0.3)] * 2), penalties=penalties)
    expected = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(found.logprobs, expected[[0, 1], found.tokens], rtol=1e-5)
    order = np.argsort(-expected, axis=-1)[:, :3]
    np.testing.assert_array_equal(found.top_tokens[:, :3], order)
    np.testing.assert_allclose(found.top_logprobs[:, :3], np.take_along_axis(expected, order, 1), rtol=1e-5)


@pytest.mark.parametrize("variant", ["plain", "full"])
def test_tempered_log_probabilities_are_those_of_the_draw(rng, variant):
    """Also of the most likely tokens. A greedy row keeps the model's."""
    logits, temperatures = normal(rng, 2, VOCAB), np.array([0.3, 0], np.float32)
    rows = slots_with([given(temperature=float(each)) for each in temperatures])
    found = run(logits, jnp.arange(2), jnp.arange(2), rows, variant=variant, tempered=True)
    expected = np.asarray(jax.nn.log_softmax(logits / jnp.array([[0.3], [1]])))
    np.testing.assert_allclose(found.logprobs, expected[[0, 1], found.tokens], rtol=1e-5)
    if variant == "full":
        np.testing.assert_allclose(found.top_logprobs[:, 0], expected.max(axis=1), rtol=1e-5)


def test_padding_rows_change_nothing(rng):
    logits, slots = normal(rng, 3, VOCAB), jnp.array([-1, 1, -1])
    found = run(logits, slots, jnp.zeros(3, jnp.int32), init_slots(2))
    assert found.tokens.tolist() == [0, jnp.argmax(logits[1]), 0]
    assert with_last_tokens(jnp.array([7, 8]), slots, found.tokens).tolist() == [7, found.tokens[1]]
    counted = count(init_penalties(2, VOCAB), slots, found.tokens).outputs
    assert counted.sum() == counted[1, found.tokens[1]] == 1


def test_frequencies_follow_the_distribution(rng):
    number = 4000
    logits = jnp.tile(normal(rng, 1, 11), (number, 1))
    options = dict(temperature=1.3, top_k=6, top_p=0.9)
    rows = slots_with([given(**options)], [seeds.integer()])
    tokens = run(logits, jnp.zeros(number, jnp.int32), jnp.arange(number), rows).tokens
    expected = generation.distribution(logits[0], **options)
    # Five standard deviations of a share.
    np.testing.assert_allclose(np.bincount(tokens, minlength=11) / number, expected, atol=5 * np.sqrt(0.25 / number))


def test_cuts_and_repetition_are_those_of_transformers(rng):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    prompt, logits = rng.integers(VOCAB, size=12), normal(rng, 1, VOCAB)
    ids, scores = torch.tensor(prompt)[None], torch.tensor(np.asarray(logits))
    steps = [
        theirs.RepetitionPenaltyLogitsProcessor(1.4),
        theirs.TemperatureLogitsWarper(0.8),
        theirs.TopKLogitsWarper(30),
        theirs.TopPLogitsWarper(0.9),
        theirs.MinPLogitsWarper(0.05),
    ]
    for step in steps:
        scores = step(ids, scores)
    options = given(temperature=0.8, top_k=30, top_p=0.9, min_p=0.05, repetition_penalty=1.4)
    # Half of the tokens as a prompt, half as output: transformers makes no difference.
    penalties = start(init_penalties(1, VOCAB), 0, penalty_row(options), jnp.asarray(prompt), 6, 12)
    ours = changed(logits, jnp.array([0]), penalties) / 0.8
    np.testing.assert_allclose(restricted(ours, slots_with([options])), scores, rtol=1e-5)


def test_presence_frequency_and_bias(rng):
    logits = normal(rng, 3, VOCAB)
    options = given(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={9: 4.0, 3: -100.0})
    tokens = jnp.array([1, 2, 2, 5, 5, 7, 96, 96])
    penalties = start(init_penalties(3, VOCAB), 2, penalty_row(options), tokens, 3, 6)
    penalties = count(penalties, jnp.array([2, -1]), jnp.array([7, 8]))
    expected = np.array(logits)
    expected[1, [9, 3]] += [4, -100]
    expected[1, [5, 7]] -= 0.5 + 2 * 0.25
    np.testing.assert_allclose(changed(logits, jnp.array([0, 2, -1]), penalties), expected, rtol=1e-5)
    assert (variant_of(options), variant_of(given())) == ("full", "greedy")


def test_a_slot_forgets_the_sequence_before(rng):
    logits, first = normal(rng, 1, VOCAB), penalty_row(given(repetition_penalty=2.0, logit_bias={3: 1.0}))
    used = start(init_penalties(1, VOCAB), 0, first, jnp.arange(8), 4, 8)
    fresh = start(used, 0, penalty_row(given()), jnp.arange(8), 4, 8)
    np.testing.assert_array_equal(changed(logits, jnp.array([0]), fresh), logits)
    assert not np.array_equal(changed(logits, jnp.array([0]), used), logits)
