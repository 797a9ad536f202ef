"""A policy draws and learns by turns: it gets better, and nothing depends on the order in which answers end."""

from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax import adapters
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.request import EngineLimits
from moe_jax.train import make_optimizer
from tests.helpers import compilations, tiny

LIMITS = EngineLimits(
    max_sequences=4, max_tokens_per_step=64, max_chunks_per_step=4, max_length=32, num_pages=32, max_waiting=64
)
SETTINGS = PolicySettings(samples=8, max_new_tokens=8)
PROMPTS = [(key, {"prompt": text}) for key, text in enumerate(["a b c d e", "what was ", "1 2 3 4 5", "x = 12345"])]


def policy_of(model, settings=SETTINGS, optimizer=None, limits=LIMITS, **options):
    optimizer = make_optimizer(3e-2, weight_decay=0.0) if optimizer is None else optimizer
    return Policy(model, optimizer, settings, tokenizer=tiny.tokenizer(), limits=limits, rows=16, **options)


def scored(groups):
    """Rewards tokens below 128."""
    for group in groups:
        rewards = [[np.mean(sample.tokens < 128)] for sample in group.samples]
        yield replace(group, rewards=np.asarray(rewards))


def one_step(policy, step):
    # Answers of one length: else later steps need programs for other numbers of rows.
    groups = list(scored(policy.sample(PROMPTS, step=step, seed=0, ignore_eos=True, stop_token_ids=())))
    return groups, policy.update(groups)


@pytest.mark.parametrize(
    "make, choices",
    [
        # With experts a whole run learns in tests/recipes/slow/test_grpo_policy.py.
        pytest.param(tiny.model, {}, marks=pytest.mark.thorough),
        (tiny.dense, dict(temperature=0.7, importance="tis")),
    ],
)
def test_it_learns(make, choices):
    """Rewards grow, the given model has the new weights, and nothing is compiled after the second step."""
    with closing(policy_of(model := make(), replace(SETTINGS, **choices))) as policy:
        means, before = [], np.array(model.embed_tokens.weight[...])
        for step in range(16):
            with compilations.counted() as compiled:
                groups, metrics = one_step(policy, step)
            means.append(np.mean([group.rewards for group in groups]))
            assert step < 2 or not compiled
            assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
            assert (metrics["weights_version"], metrics["groups_dropped"]) == (step + 1, 0)
            assert metrics["entropy"] > 0 and metrics["grad_norm"] > 0
        assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.1
        assert not np.array_equal(before, model.embed_tokens.weight[...])
        assert (groups[0].samples[0].expert_ids is not None) == (model.config.experts is not None)


def test_the_order_of_completion_changes_nothing():
    """Prompts in another order, fewer of them at once: the same answers by name, and the same weights."""
    found = []
    for order, sequences in ((1, 4), (-1, 1)):
        limits = replace(LIMITS, max_sequences=sequences)
        with closing(policy_of(tiny.dense(), optimizer=optax.sgd(0.1), limits=limits)) as policy:
            groups = list(scored(policy.sample(PROMPTS[::order], step=0, seed=5)))
            policy.update(groups)
            found.append((sorted(groups, key=lambda group: group.key), policy.state.params))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        for sample, same in zip(one.samples, other.samples, strict=True):
            assert (sample.seed, sample.text, sample.finish_reason) == (same.seed, same.text, same.finish_reason)
            np.testing.assert_array_equal(sample.tokens, same.tokens)
    for one, other in zip(*(jax.tree.leaves(params) for _, params in found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_donated_arrays_are_never_met():
    """Requests during an update, updates during requests, and a step that fails: each is refused, and the policy lives on."""
    with closing(policy_of(tiny.dense())) as policy:
        coming = policy.sample(PROMPTS, step=0, seed=0)
        first = next(coming)
        with pytest.raises(RuntimeError, match="sleeps only without requests"):
            policy.update(scored([first]))
        groups = [*scored([first, *coming])]

        def failing(state, batch):
            with pytest.raises(RuntimeError, match="the engine sleeps"):
                next(policy.sample(PROMPTS, step=1, seed=0))
            raise MemoryError

        policy._steps = {2: failing}
        with pytest.raises(MemoryError):
            policy.update(groups)
        policy._steps = {}
        again = list(scored(policy.sample(PROMPTS, step=0, seed=0)))
        assert [group.samples[0].text for group in again] == [group.samples[0].text for group in groups]
        policy.update(again)
        saved = jax.tree.map(np.array, policy.state)
        after = [group.samples[0].text for group in policy.sample(PROMPTS, step=1, seed=0)]
        one_step(policy, 1)
        policy.restore(jax.tree.map(jax.numpy.asarray, saved))
        assert [group.samples[0].text for group in policy.sample(PROMPTS, step=1, seed=0)] == after


@pytest.mark.thorough
def test_adapters_diverge_from_the_model_below():
    adapters.add_lora(model := tiny.model(), adapters.LoraSettings(rank=2), rngs=nnx.Rngs(1))
    with closing(policy_of(model, replace(SETTINGS, beta=0.1))) as policy:
        kls = [one_step(policy, step)[1]["kl"] for step in range(2)]
    assert abs(kls[0]) < 1e-6 and kls[1] > 1e-5
