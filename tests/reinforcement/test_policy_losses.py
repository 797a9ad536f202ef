"""Each policy loss and its gradient in the log-probabilities equal TRL's, in every combination of settings."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moe_jax.kernels.vocabulary import TokenScores
from moe_jax.reinforcement import PolicySettings, losses
from moe_jax.reinforcement.objective import PolicyLoss, parts_of_tokens
from tests.helpers import seeds
from tests.helpers import trl_reference as trl

SAMPLES, LENGTH = 6, 9
CLIPS = ((0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 3.0))
IMPORTANCE = {
    "none": {},
    "tis": dict(importance="tis", importance_high=1.2),
    "icepop": dict(importance="icepop", importance_low=0.7, importance_high=1.4),
    "tis of samples": dict(importance="tis", importance_level="sequence", importance_high=1.2),
    "icepop of samples": dict(importance="icepop", importance_level="sequence", importance_low=0.5, importance_high=2.0),
}
MODES = {"none": "none", "tis": "token_truncate", "icepop": "token_mask", "tis of samples": "sequence_truncate"}
MODES["icepop of samples"] = "sequence_mask"
"""TRL's names."""


@pytest.fixture(scope="module")
def arrays():
    """Arrays [samples, length]: log-probabilities of four models, the mask of answers with a tool's tokens, and advantages."""
    rng = seeds.rng("policy losses")
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (SAMPLES, 1))
    mask &= rng.random(mask.shape) < 0.8
    mask[:, 0], mask[-1] = True, False
    log_probs = -rng.gamma(1.0, 1.0, mask.shape)
    others = [log_probs + rng.normal(0, 0.3, mask.shape) for _ in range(3)]
    names = "log_probs", "old_log_probs", "sampled_log_probs", "reference_log_probs"
    found = {name: array.astype(np.float32) for name, array in zip(names, [log_probs, *others], strict=True)}
    return found | {"mask": mask, "advantages": rng.normal(size=SAMPLES).astype(np.float32)}


def weights(loss, mask):
    """Returns the weights of `token_weights`, written again."""
    counts = mask.sum(1, keepdims=True).clip(1)
    divisor = {"dapo": mask.sum(), "cispo": mask.sum(), "dr_grpo": SAMPLES * 16}.get(loss, SAMPLES * counts)
    return (mask / divisor).astype(np.float32)


def ours(settings, arrays):
    """Returns our loss, its gradient, and all sums and largest values."""
    mask = arrays["mask"]
    batch = {name: jnp.asarray(array) for name, array in arrays.items() if name.endswith("log_probs")}
    batch |= dict(loss_mask=jnp.asarray(weights(settings.loss, mask)), segment_ids=jnp.ones(mask.shape, jnp.int32))
    batch |= dict(num_learned=jnp.float32(mask.sum()))
    batch["advantage"] = jnp.asarray(np.broadcast_to(arrays["advantages"][:, None], mask.shape))

    def loss(log_probs):
        parts, extremes = parts_of_tokens(settings, TokenScores(log_probs, jnp.ones_like(log_probs)), batch)
        return parts["loss"], parts | extremes

    (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(batch.pop("log_probs"))
    return value, gradient, parts


def theirs(settings, arrays, mode):
    """Returns TRL's loss, its gradient, and its metrics."""
    mask = torch.tensor(arrays["mask"]).long()
    leaf = torch.tensor(arrays["log_probs"], requires_grad=True)
    low, high = (0.0, settings.cispo_cap) if settings.loss == "cispo" else settings.clip
    trainer = trl.grpo_trainer(
        lambda *_: (leaf, torch.ones_like(leaf), None),
        loss_type="grpo" if settings.loss == "gspo" else settings.loss,
        level="sequence" if settings.loss == "gspo" else "token",
        clip=(low, high),
        delta=settings.dual_clip,
        beta=settings.beta,
        bias_correction=settings.kl_bias_correction,
        max_completion_length=16,
        off_policy_mask_threshold=settings.off_policy_threshold,
        use_vllm=mode != "none",
    )
    inputs = dict(prompt_ids=mask[:, :0], prompt_mask=mask[:, :0], completion_ids=mask, completion_mask=mask)
    inputs |= dict(advantages=torch.tensor(arrays["advantages"]), num_items_in_batch=mask.sum())
    old, sampled = (torch.tensor(arrays[name]) for name in ("old_log_probs", "sampled_log_probs"))
    inputs |= dict(old_per_token_logps=old, sampling_per_token_logps=sampled)
    inputs["ref_per_token_logps"] = torch.tensor(arrays["reference_log_probs"])
    if mode != "none":
        trainer.__dict__["vllm_importance_sampling_mode"] = mode
        trainer.__dict__["vllm_importance_sampling_clip_min"] = settings.importance_low
        trainer.__dict__["vllm_importance_sampling_clip_max"] = settings.importance_high
        given = dict(self=trainer, mask=mask, old_per_token_logps=old, sampling_per_token_logps=sampled)
        found = trl.run_grpo("per_token_logps_diff = (old", "# Compute the per-token log probabilities for the ref", **given)
        inputs["importance_sampling_ratio"] = found["vllm_importance_sampling_ratio"]
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach().numpy(), leaf.grad.numpy(), trl.metrics_of(trainer)


def cases(loss, importance):
    """Yields all settings of a loss; fewer with importance factors."""
    kls = ((0.0, True), (0.04, True), (0.04, False))
    others = product(kls, CLIPS, (None, 0.05)) if importance == "none" else product(kls, CLIPS[2:], (0.05,))
    for (beta, bias), (low, high, dual), threshold in others:
        clip = {} if loss == "cispo" else dict(clip_low=low, clip_high=high, dual_clip=dual)
        if loss == "cispo":
            clip = dict(cispo_cap=1 + high if dual is None else dual)
        options = dict(beta=beta, kl_bias_correction=bias, off_policy_threshold=threshold, max_new_tokens=16)
        yield PolicySettings(loss=loss, **clip, **options, **IMPORTANCE[importance])


@pytest.mark.parametrize("importance", IMPORTANCE)
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_values_gradients_and_metrics_are_those_of_trl(loss, importance, arrays):
    for settings in cases(loss, importance):
        value, gradient, parts = ours(settings, arrays)
        wanted, of_leaf, metrics = theirs(settings, arrays, MODES[importance])
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=str(settings))
        np.testing.assert_allclose(gradient, of_leaf, rtol=1e-4, atol=1e-7, err_msg=str(settings))
        for name in metrics.keys() & parts.keys() if loss != "gspo" else ():
            sign = -1 if name.endswith("_min") else 1
            np.testing.assert_allclose(sign * parts[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=f"{name}: {settings}")


def test_exact_values_have_the_gradients_of_the_ordinary_pass(arrays):
    """The first update's ratios are exactly 1. Later updates compare given values of the model with the sampler's."""
    inexact, learned = PolicySettings(beta=0.0), weights("dapo", arrays["mask"]) * arrays["advantages"][:, None]
    of_first_update = {name: arrays[name] for name in arrays if name != "old_log_probs"}
    value, gradient, parts = ours(replace(inexact, exact=True), of_first_update)
    np.testing.assert_allclose(value, -learned.sum(), atol=1e-7)
    np.testing.assert_array_equal(gradient, ours(inexact, of_first_update)[1])
    assert parts["sampling/sampling_logp_difference/max"] > 0.3
    given = of_first_update | {"current_log_probs": arrays["sampled_log_probs"] + 1}
    bounded = np.where(arrays["advantages"] > 0, 1.28, np.e)[:, None]
    np.testing.assert_allclose(ours(replace(inexact, exact=True), given)[0], -(learned * bounded).sum(), rtol=1e-5)


def test_a_batch_without_what_its_loss_reads_is_refused():
    with pytest.raises(ValueError, match="a batch for PolicyLoss needs the array.s. .*, reference_log_probs"):
        PolicyLoss(PolicySettings(beta=0.1)).prepare({"tokens": jnp.zeros((1, 1))}, jnp.ones(()))


def test_estimators_of_the_divergence(rng):
    """Their mean over samples of p is KL(p || q); the gradient of k3 * ratio, and of k1 * ratio, is that of the divergence."""
    logits, others = (jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2))
    reference = jax.nn.log_softmax(others)

    def divergence(logits):
        p = jax.nn.log_softmax(logits)
        return (jnp.exp(p) * (p - reference)).sum()

    def expected(kind, logits, biased=False):
        """The expectation over tokens drawn from p, whose own probabilities have no gradient."""
        p = jax.nn.log_softmax(logits)
        drawn = jax.lax.stop_gradient(p)
        kl = losses.kl_estimate(p, reference, kind)
        return (jnp.exp(drawn) * (kl if biased else kl * jnp.exp(p - drawn))).sum()

    for kind in ("k1", "k3"):
        np.testing.assert_allclose(expected(kind, logits), divergence(logits), rtol=1e-5)
        found = jax.grad(lambda logits, kind=kind: expected(kind, logits))(logits)
        np.testing.assert_allclose(found, jax.grad(divergence)(logits), atol=1e-6)
    d = np.asarray(jax.nn.log_softmax(logits) - reference)
    np.testing.assert_allclose(losses.kl_estimate(jnp.asarray(d), jnp.zeros(6), "k2"), d**2 / 2, rtol=1e-6)
    biased = jax.grad(lambda logits: expected("k3", logits, biased=True))(logits)
    assert np.abs(biased - jax.grad(divergence)(logits)).max() > 1e-3


def test_distillation_by_policy_gradient(rng):
    """The gradient of GRPO's loss with these advantages is that of the reverse KL divergence from the teacher."""
    logits, teacher = (
        jnp.asarray(rng.normal(size=6), jnp.float32),
        jax.nn.log_softmax(jnp.asarray(rng.normal(size=6), jnp.float32)),
    )
    p = jax.nn.log_softmax(logits)

    def loss(logits):
        log_probs = jax.nn.log_softmax(logits)
        return (jnp.exp(p) * losses.clipped_loss(log_probs - p, losses.distillation_advantage(p, teacher))).sum()

    def divergence(logits):
        log_probs = jax.nn.log_softmax(logits)
        return (jnp.exp(log_probs) * (log_probs - teacher)).sum()

    np.testing.assert_allclose(jax.grad(loss)(logits), jax.grad(divergence)(logits), atol=1e-6)


def test_sums_over_samples(rng):
    values, counted = rng.normal(size=(2, 9)).astype(np.float32), rng.random((2, 9)) < 0.6
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 3]])
    found = losses.sample_mean(jnp.asarray(values), jnp.asarray(counted), jnp.asarray(segments))
    for row, column in np.ndindex(2, 9):
        own = counted[row] & (segments[row] == segments[row, column])
        wanted = values[row][own].mean() if own.any() else 0
        np.testing.assert_allclose(found[row, column], wanted, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(loss="ppo"), "loss='ppo' must be one of dapo, grpo, dr_grpo, gspo, cispo"),
        (dict(samples=1), "samples=1 must be an integer of at least 2"),
        (dict(beta=-0.1), "beta=-0.1 must be a number of at least 0"),
        (dict(temperature=0), "temperature=0 must be a number greater than 0"),
        (dict(beta=float("nan")), "beta=nan must be"),
        (dict(exact=1), "exact=1 must be True or False"),
        (dict(dual_clip=1.1), "dual_clip=1.1 must be greater than 1 + clip_high = 1.28"),
        (dict(overlong_buffer=2000), "overlong_buffer=2000 must not exceed max_new_tokens=1024"),
        (dict(exact=True, importance="tis"), "importance='tis' corrects a difference that exact=True excludes"),
        (dict(loss="cispo", clip_low=0.1), "clip_low=0.1 is not read by loss='cispo'"),
        (dict(cispo_cap=2.0), "cispo_cap=2.0 is not read by loss='dapo'"),
        (dict(importance="tis", importance_low=3.0), "importance_low=3.0 must not exceed importance_high=2.0"),
        (dict(reward_weights=[1.0]), "reward_weights=[1.0] must be a tuple of numbers"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match="PolicySettings: ") as error:
        PolicySettings(**options)
    assert message in str(error.value)


def test_defaults_depend_on_the_loss():
    assert PolicySettings().clip == (0.2, 0.28) and PolicySettings(loss="gspo").clip == (3e-4, 4e-4)
    assert PolicySettings(loss="gspo", clip_high=0.1).clip == (3e-4, 0.1)
    assert PolicySettings().scales_advantages and not PolicySettings(loss="dr_grpo").scales_advantages
    assert PolicySettings(loss="dr_grpo", advantage_scale="group").scales_advantages
