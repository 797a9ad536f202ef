"""Packed rows of samples: each sample's tokens and values come back by its number; wrong samples are refused by name."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from moe_jax.reinforcement import PolicySettings, policy_rows, token_weights
from tests.helpers.policy_samples import make_groups, random_like

EXPERTS = 2, 3, 8


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.sampled_from([None, 30, 32]))
def test_everything_comes_back_by_name(seed, groups, samples, num_rows):
    rng = np.random.default_rng(seed)
    drawn = make_groups(rng, groups, samples, longest=20, tools=True, experts=EXPERTS)
    of_tokens, weights = random_like(rng, drawn), token_weights(drawn, PolicySettings())
    batch = policy_rows(drawn, of_tokens, weights, seq_len=32, num_rows=num_rows)
    rows, seq = batch["tokens"].shape
    assert seq == 32 and num_rows in (None, rows) and batch["expert_ids"].shape == (rows, 32, 2, 3)
    number = 0
    for group, its_advantages, its_weights in zip(drawn, of_tokens, weights, strict=True):
        for sample, advantage, weight in zip(group.samples, its_advantages, its_weights, strict=True):
            row, places = np.nonzero(batch["sample"] == number)
            prompt, length = len(group.prompt_tokens), len(group.prompt_tokens) + len(sample.tokens)
            assert len(set(row)) == 1 and len(set(batch["segment_ids"][row, places])) == 1
            own = {name: array[row, places] for name, array in batch.items()}
            np.testing.assert_array_equal(own["tokens"], np.append(group.prompt_tokens, sample.tokens))
            np.testing.assert_array_equal(own["positions"], np.arange(length))
            np.testing.assert_array_equal(own["expert_ids"][:-1], sample.expert_ids)
            # The value of a token is stored where the token is the label.
            answer = slice(prompt - 1, length - 1)
            np.testing.assert_array_equal(own["labels"][answer], sample.tokens)
            for name, values in (("loss_mask", weight), ("advantage", advantage), ("sampled_log_probs", sample.log_probs)):
                np.testing.assert_array_equal(own[name][answer], values)
                assert not own[name][: prompt - 1].any() and not own[name][-1]
            number += 1
    padding = batch["sample"] < 0
    assert not batch["segment_ids"][padding].any() and batch["segment_ids"][~padding].all()
    assert not batch["loss_mask"][padding].any()


def test_samples_fill_the_first_row_with_room_in_their_order(rng):
    groups = make_groups(rng, 2, 3, longest=9)
    batch = policy_rows(groups, [np.ones(3)] * 2, token_weights(groups, PolicySettings()), seq_len=16)
    lengths = [len(group.prompt_tokens) + len(sample.tokens) for group in groups for sample in group.samples]
    free = []
    for number, length in enumerate(lengths):
        row = next((i for i, left in enumerate(free) if left >= length), len(free))
        free += [16] * (row == len(free))
        assert batch["sample"][row, 16 - free[row]] == number
        free[row] -= length
    assert len(batch["tokens"]) == len(free)
    more = policy_rows(groups, [np.ones(3)] * 2, token_weights(groups, PolicySettings()), seq_len=16, num_rows=9)
    assert all(array.shape[0] == 9 for array in more.values())


def test_samples_without_weight_are_left_out(rng):
    groups = make_groups(rng, 1, 3)
    weights = token_weights(groups, PolicySettings())
    weights[0][1][:] = 0
    batch = policy_rows(groups, [np.ones(3)], weights, seq_len=64)
    assert set(np.unique(batch["sample"])) == {-1, 0, 2}
    for of_sample in weights[0]:
        of_sample[:] = 0
    assert policy_rows(groups, [np.ones(3)], weights, seq_len=64, num_rows=2)["tokens"].shape == (2, 64)


def test_refusals(rng):
    groups = make_groups(rng, 2, 2, longest=6, experts=EXPERTS)
    ones, weights = [np.ones(2)] * 2, token_weights(groups, PolicySettings())

    def refused(groups, message, **options):
        with pytest.raises(ValueError, match=message):
            policy_rows(groups, ones, weights, **{"seq_len": 16, **options})

    refused(groups, r"group 0, sample 0 has \d+ tokens of prompt and answer; a row has seq_len=1", seq_len=1)
    refused(groups, "num_rows=0 must be at least", num_rows=0)
    first, last = groups[1].samples
    without = replace(groups[1], samples=(first, replace(last, expert_ids=None)))
    refused([groups[0], without], "group 1, sample 1: all samples must have expert_ids, or none of them")
    short = replace(groups[1], samples=(first, replace(last, expert_ids=last.expert_ids[:0])))
    refused([groups[0], short], r"group 1, sample 1 has expert_ids of 0 tokens; prompt and answer have \d+")
    with pytest.raises(ValueError, match="at least one sample"):
        policy_rows([], [], [], seq_len=16)
