"""Advantages equal TRL's, sum to 0 in a group, ignore order, shift and scale, and are never NaN. Weights carry the divisor."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from moe_jax.reinforcement import (
    Group,
    PolicySettings,
    advantages,
    has_spread,
    kept_groups,
    token_weights,
    total_rewards,
)
from tests.helpers import trl_reference as trl
from tests.helpers.policy_samples import make_groups, make_sample

REWARDS = arrays(np.float64, st.integers(2, 9), elements=st.integers(-5, 5).map(float) | st.just(np.nan))
EVERY_LOSS = "dapo", "grpo", "dr_grpo", "gspo", "cispo"


def with_rewards(groups, rewards):
    return [Group(**{**vars(group), "rewards": of_group}) for group, of_group in zip(groups, rewards, strict=True)]


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("samples", [2, 5])
def test_trl(scale, samples, rng):
    """With several functions that leave samples out, and with groups without spread or with one reward."""
    weights = 1.0, 0.3, -2.0
    groups = make_groups(rng, 20, samples)
    rewards = rng.integers(0, 3, (20, samples, 3)).astype(float)
    rewards[rng.random(rewards.shape) < 0.4] = np.nan
    rewards[0], rewards[1], rewards[2, 1:] = np.nan, 0.7, np.nan
    chosen = PolicySettings(advantage_scale=scale, reward_weights=weights)
    totals = [total_rewards(group, chosen) for group in with_rewards(groups, rewards)]
    found = np.stack(advantages(totals, chosen))
    theirs = advantages_of_trl(rewards, weights, multi_objective_aggregation="sum_then_normalize", scale_rewards=scale)
    spread = np.array([has_spread(of_group) for of_group in totals])
    assert 5 < spread.sum() < 20
    np.testing.assert_allclose(found[spread], theirs[spread], rtol=1e-4, atol=1e-5)
    # Without spread, TRL's mean may differ from the rewards by rounding.
    np.testing.assert_allclose(theirs[~spread], 0, atol=5e-3)
    assert not found[~spread].any()


def advantages_of_trl(rewards, weights, **options):
    groups, samples, functions = rewards.shape
    trainer = trl.grpo_trainer(None, loss_type="dapo", **options)
    trainer.reward_weights, trainer.reward_funcs = torch.tensor(weights), [None] * functions
    per_function = torch.tensor(rewards, dtype=torch.float32).reshape(-1, functions)
    given = dict(self=trainer, rewards_per_func=per_function, num_generations=samples, device="cpu")
    found = trl.run_grpo("unscorable_mask = torch", "# Slice to keep only the local part", **given)["advantages"]
    return found.numpy().reshape(groups, samples)


def test_gdpo(rng):
    """TRL's values. A function of a large scale does not hide a small one's rewards, and the overlong penalty is a function."""
    weights, groups = (1.0, 0.3, -2.0), make_groups(rng, 20, 5)
    rewards = rng.integers(0, 3, (20, 5, 3)) * np.array([1.0, 1000.0, 0.1])
    rewards[rng.random(rewards.shape) < 0.3] = np.nan
    rewards[0], rewards[1] = np.nan, 0.7
    chosen = PolicySettings(advantage_scale="gdpo", reward_weights=weights)
    found = np.stack(advantages([total_rewards(group, chosen) for group in with_rewards(groups, rewards)], chosen))
    theirs = advantages_of_trl(rewards, weights, multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    np.testing.assert_allclose(found, theirs, atol=5e-3)
    assert np.abs(found).max() > 1 and not found[0].any()
    group = Group(**{**vars(groups[0]), "rewards": np.zeros((5, 1))})
    penalised = PolicySettings(advantage_scale="gdpo", max_new_tokens=8, overlong_buffer=8)
    assert has_spread(total_rewards(group, penalised)) == (len({sample.own.sum() for sample in group.samples}) > 1)


@settings(max_examples=100, deadline=None)
@given(REWARDS, st.sampled_from(["group", "none", "gdpo"]), st.integers(0, 2**32 - 1))
def test_properties(rewards, scale, seed):
    chosen = PolicySettings(advantage_scale=scale)
    (found,) = advantages([rewards], chosen)
    present = ~np.isnan(rewards)
    assert found.dtype == np.float32 and np.isfinite(found).all() and not found[~present].any()
    np.testing.assert_allclose(found.sum(), 0, atol=1e-4)
    assert found.any() == has_spread(rewards) == (len(set(rewards[present])) > 1)
    order = np.random.default_rng(seed).permutation(len(rewards))
    np.testing.assert_allclose(advantages([rewards[order]], chosen)[0], found[order], atol=1e-5)
    np.testing.assert_allclose(advantages([rewards + 3], chosen)[0], found, atol=1e-5)
    factor = 2 if scale == "none" else 1
    np.testing.assert_allclose(advantages([2 * rewards], chosen)[0], factor * found, atol=2e-3)
    # A sample without a reward changes nothing.
    np.testing.assert_array_equal(advantages([np.append(rewards, np.nan)], chosen)[0][:-1], found)


def test_a_failed_sample_is_as_if_it_had_never_been_drawn(rng):
    (group,) = make_groups(rng, 1, 4)
    failed = make_sample(rng, 5, finish_reason="error")
    more = Group(**{**vars(group), "samples": (*group.samples, failed), "rewards": np.append(group.rewards, [[9.0]], axis=0)})
    for loss in EVERY_LOSS:
        chosen = PolicySettings(loss=loss)
        (found,), (wanted,) = (advantages([total_rewards(of, chosen)], chosen) for of in (more, group))
        np.testing.assert_array_equal(found, np.append(wanted, 0))
        (found,), (wanted,) = token_weights([more], chosen), token_weights([group], chosen)
        assert not found[4].any()
        for ours, others in zip(found, wanted, strict=False):
            np.testing.assert_array_equal(ours, others)


def test_truncated_samples_count_in_their_group_alone(rng):
    (group,) = make_groups(rng, 1, 3)
    cut = Group(**{**vars(group), "samples": (*group.samples[:2], make_sample(rng, 6, finish_reason="length"))})
    chosen, other = PolicySettings(mask_truncated=True), PolicySettings()
    np.testing.assert_array_equal(total_rewards(cut, chosen), total_rewards(cut, other))
    assert not token_weights([cut], chosen)[0][2].any() and token_weights([cut], other)[0][2].all()


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_weights_carry_the_divisor(loss, rng):
    groups = make_groups(rng, 3, 4, tools=True)
    chosen = PolicySettings(loss=loss, max_new_tokens=10)
    found = [weights for of_group in token_weights(groups, chosen) for weights in of_group]
    own = [sample.own for group in groups for sample in group.samples]
    for weights, of_model in zip(found, own, strict=True):
        np.testing.assert_array_equal(weights != 0, of_model)
    if loss == "dr_grpo":
        np.testing.assert_allclose(np.concatenate(found)[np.concatenate(own)], 1 / (12 * 10), rtol=1e-6)
    else:
        np.testing.assert_allclose(sum(weights.sum() for weights in found), 1, rtol=1e-6)
    if loss in ("grpo", "gspo"):
        np.testing.assert_allclose([weights.sum() for weights in found], 1 / 12, rtol=1e-6)


def test_overlong_answers_are_punished(rng):
    samples = tuple(make_sample(rng, length) for length in (5, 8, 10, 12))
    group = Group(key=0, row={}, prompt_tokens=np.array([1]), samples=samples, rewards=np.ones((4, 1)))
    chosen = PolicySettings(max_new_tokens=12, overlong_buffer=4, overlong_factor=0.5)
    np.testing.assert_allclose(total_rewards(group, chosen), [1, 1, 0.75, 0.5])


def test_groups_without_spread_are_dropped(rng):
    groups = with_rewards(make_groups(rng, 3, 2), [[[1.0], [1.0]], [[0.0], [1.0]], [[np.nan], [1.0]]])
    groups = with_rewards(groups, [np.asarray(group.rewards) for group in groups])
    assert [group.key for group in kept_groups(groups, PolicySettings(keep_groups="with_spread"))] == [1]
    assert [group.key for group in kept_groups(groups, PolicySettings())] == [0, 1, 2]


def test_refusals(rng):
    (group,) = make_groups(rng, 1, 2, functions=2)
    with pytest.raises(ValueError, match="group 0 has no rewards"):
        total_rewards(Group(**{**vars(group), "rewards": None}), PolicySettings())
    with pytest.raises(ValueError, match="group 0: sample 1 has an infinite reward of function 0"):
        total_rewards(Group(**{**vars(group), "rewards": np.array([[0, 0], [np.inf, 0]])}), PolicySettings())
    with pytest.raises(ValueError, match=r"reward_weights=\(1.0,\) must have a weight for each of the 2 reward functions"):
        total_rewards(group, PolicySettings(reward_weights=(1.0,)))
