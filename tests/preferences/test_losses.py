"""Each loss and its gradient in the log-probabilities equal TRL's; extreme log-probabilities stay finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moe_jax.preferences.losses import (
    Pair,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from tests.helpers import seeds
from tests.helpers import trl_reference as trl

PAIRS, LENGTH = 5, 9


@pytest.fixture
def answers():
    """Log-probabilities of tokens [2, pairs, length] of policy and reference, chosen first, and masks of their answers."""
    rng = seeds.rng()
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH, (2, PAIRS, 1))
    policy, reference = (-rng.gamma(1.0, 1.0, (2, PAIRS, LENGTH)) * mask for _ in range(2))
    return policy.astype(np.float32), reference.astype(np.float32), mask


def sums(log_probs):
    return Pair(*log_probs.sum(-1))


def means(log_probs, mask):
    return Pair(*(log_probs.sum(-1) / mask.sum(-1)))


def assert_same(ours, policy, theirs, leaf):
    """Compares the mean of ours(policy) and its gradient with a loss of torch and the gradient in its leaf."""
    theirs.backward()
    value, gradient = jax.value_and_grad(lambda policy: ours(policy).mean())(jnp.asarray(policy))
    np.testing.assert_allclose(value, theirs.detach(), rtol=1e-5)
    np.testing.assert_allclose(gradient, leaf.grad.reshape(gradient.shape), rtol=1e-5, atol=1e-7)
    assert np.abs(gradient).max() > 1e-4


@pytest.mark.parametrize("loss_type, ours", [("sigmoid", dpo_loss), ("hinge", hinge_loss), ("ipo", ipo_loss)])
def test_losses_with_a_reference(answers, loss_type, ours):
    policy, reference, mask = answers
    trainer, leaf = trl.dpo_trainer(loss_type, 0.3), torch.tensor(policy.reshape(2 * PAIRS, -1), requires_grad=True)
    of_sequences = torch.tensor(reference.sum(-1))
    completion = torch.tensor(np.pad(mask.reshape(2 * PAIRS, -1), [(0, 0), (1, 0)])).long()
    inputs = dict(input_ids=completion, attention_mask=completion, completion_mask=completion)
    inputs |= dict(ref_chosen_logps=of_sequences[0], ref_rejected_logps=of_sequences[1])
    theirs = trainer._compute_loss(trl.GivenLogProbs(leaf).train(), inputs, False)
    of_answers = (lambda x: means(x, mask)) if loss_type == "ipo" else sums
    assert_same(lambda p: ours(of_answers(p), of_answers(reference), beta=0.3), policy, theirs, leaf)


def test_label_smoothing(answers):
    """DPO's loss of smoothed labels is what TRL's CPO computes of log-ratios."""
    policy, reference, _ = answers
    leaf = torch.tensor(policy, requires_grad=True)
    ratios = leaf.sum(-1) - torch.tensor(reference).sum(-1)
    theirs = trl.cpo_trainer("sigmoid", 0.3, label_smoothing=0.2).cpo_loss(*ratios)[0].mean()
    assert_same(lambda p: dpo_loss(sums(p), sums(reference), beta=0.3, label_smoothing=0.2), policy, theirs, leaf)


def test_orpo(answers):
    policy, _, mask = answers
    leaf = torch.tensor(policy, requires_grad=True)
    theirs = -trl.orpo_trainer(0.3).odds_ratio_loss(*(leaf.sum(-1) / torch.tensor(mask).sum(-1)))[0].mean()
    assert_same(lambda p: orpo_loss(means(p, mask), beta=0.3), policy, theirs, leaf)


def test_simpo(answers):
    policy, _, mask = answers
    leaf = torch.tensor(policy, requires_grad=True)
    theirs = trl.cpo_trainer("simpo", 2.0, gamma=0.7).cpo_loss(*(leaf.sum(-1) / torch.tensor(mask).sum(-1)))[0].mean()
    assert_same(lambda p: simpo_loss(means(p, mask), beta=2.0, gamma=0.7), policy, theirs, leaf)


@pytest.mark.parametrize("shift", [0.3, -0.3])
def test_kto(answers, shift):
    """The second half are the mismatched answers of the baseline, which is clipped at 0 where `shift` is negative."""
    (policy, mismatched), (reference, of_mismatched), (mask, other_mask) = answers
    mismatched = (of_mismatched + shift * other_mask).astype(np.float32)
    desirable, weights = np.asarray([1, 0, 0, 1, 0]), (1.3, 0.6)
    trainer, leaf = trl.kto_trainer(0.3, weights), torch.tensor(policy, requires_grad=True)
    inputs = dict(label=torch.tensor(desirable).bool())
    for prefix, answered in (("", mask), ("KL_", other_mask)):
        completion = torch.tensor(np.pad(answered, [(0, 0), (1, 0)])).long()
        inputs |= {prefix + name: completion for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= dict(ref_logps=torch.tensor(reference.sum(-1)), ref_KL_logps=torch.tensor(of_mismatched.sum(-1)))
    theirs = trainer._compute_loss(trl.GivenLogProbs(torch.tensor(mismatched), leaf).train(), inputs, False)

    kl = kto_baseline((mismatched - of_mismatched).sum(-1).mean())
    np.testing.assert_allclose(kl, trl.metrics_of(trainer)["kl"], rtol=1e-5)
    assert (kl > 0) == (shift > 0)
    options = dict(beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1])
    assert_same(lambda p: kto_loss(p.sum(-1), reference.sum(-1), jnp.asarray(desirable), kl, **options), policy, theirs, leaf)


def test_no_gradient_of_the_baseline():
    assert jax.grad(kto_baseline)(2.0) == 0


@pytest.mark.parametrize("of_pair", [(0.0, -1.0), (-1e-9, -300.0), (-300.0, 0.0), (-0.6931472, -0.6931471)])
def test_certain_answers(of_pair):
    """An answer of probability 1, or of nearly 0, leaves ORPO's value and gradient finite."""
    value, gradient = jax.value_and_grad(lambda pair: orpo_loss(Pair(*pair)))(jnp.asarray(of_pair))
    assert np.isfinite(value) and np.isfinite(gradient).all()
