"""The objective equals TRL's trainer through a model, however samples are packed, and replays experts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from moe_jax import adapters, train
from moe_jax.checkpoint.hf_names import export
from moe_jax.reinforcement import PolicyLoss, PolicySettings, advantages, sampled_token_scores, token_weights, total_rewards
from moe_jax.train.gradients import accumulate, gradients_fn
from tests.helpers import seeds, tiny
from tests.helpers import trl_reference as trl
from tests.helpers.hf_reference import by_parameter, hub_gradients, load_ours, reference
from tests.helpers.policy_samples import make_groups, packed, random_like

SETTINGS = {
    "dapo": PolicySettings(beta=0.04, balance_coef=0.1),
    "grpo": PolicySettings(loss="grpo", beta=0.04, kl_bias_correction=False),
    "dr_grpo": PolicySettings(loss="dr_grpo", max_new_tokens=8, dual_clip=3.0),
    "gspo": PolicySettings(loss="gspo", clip_low=0.05, clip_high=0.05),
    "cispo": PolicySettings(loss="cispo", cispo_cap=1.1),
    "sequences": PolicySettings(
        loss="gspo", beta=0.1, importance="tis", importance_level="sequence", off_policy_threshold=0.1, balance_coef=0.1
    ),
}


@pytest.fixture(scope="module")
def models():
    """A small mixture of experts of transformers, and ours of the same weights."""
    theirs = reference("qwen3_moe", seeds.integer("policy"), num_hidden_layers=2)
    return theirs, load_ours(theirs)


def others_of(rng, groups):
    """Returns log-probabilities near the sampler's: of the model before the update, and of a reference."""
    others = {}
    for name in ("old_log_probs", "reference_log_probs"):
        noise = random_like(rng, groups, 0.2)
        others[name] = [
            [sample.log_probs + shift for sample, shift in zip(group.samples, shifts, strict=True)]
            for group, shifts in zip(groups, noise, strict=True)
        ]
    return others


def value_and_gradients(objective, model, batch, micro_batches=1):
    graph, params, fixed = nnx.split(model, nnx.Param, ...)
    return _value_and_gradients(replace(objective, micro_batches=micro_batches), graph, params, fixed, batch)


@partial(jax.jit, static_argnums=(0, 1))
def _value_and_gradients(objective, graph, params, fixed, batch):
    compute = accumulate(gradients_fn(objective, graph), objective.micro_batches)
    value, aux, gradients = compute(params, fixed, objective.prepare(batch, jnp.ones(())))
    return value, objective.metrics(value, aux, jnp.ones(())), gradients


def padded(groups, values, fill=0.0):
    """Returns an array [samples, longest] of a value for each token."""
    flat = [np.asarray(value) for of_group in values for value in of_group]
    longest = max(map(len, flat))
    return torch.tensor(np.stack([np.pad(value, (0, longest - len(value)), constant_values=fill) for value in flat]))


def loss_of_trl(settings, model, groups, others):
    """Returns TRL's loss of the groups with a graph, and its metrics. Texts are padded at their end."""
    samples = [(group.prompt_tokens, sample) for group in groups for sample in group.samples]
    texts = padded(groups, [[np.append(prompt, sample.tokens) for prompt, sample in samples]])
    lengths = torch.tensor([len(prompt) + len(sample.tokens) for prompt, sample in samples])
    attention = (torch.arange(texts.shape[1]) < lengths[:, None]).long()
    own = padded(groups, [[sample.own for _, sample in samples]]).long()

    def log_probs_of(model, *_):
        found = model(texts, attention_mask=attention, output_router_logits=True)
        log_probs = found.logits.log_softmax(-1)
        labels = torch.roll(texts, -1, 1)
        starts = torch.tensor([len(prompt) - 1 for prompt, _ in samples])
        places = (starts[:, None] + torch.arange(own.shape[1])).clamp(max=texts.shape[1] - 1)
        of_labels = log_probs.gather(2, labels[:, :, None])[:, :, 0].gather(1, places)
        entropies = -(log_probs.exp() * log_probs).sum(-1).gather(1, places)
        return of_labels, entropies, found.aux_loss

    trainer = trl.grpo_trainer(
        log_probs_of,
        loss_type="grpo" if settings.loss == "gspo" else settings.loss,
        level="sequence" if settings.loss == "gspo" else "token",
        clip=(0.0, settings.cispo_cap) if settings.loss == "cispo" else settings.clip,
        delta=settings.dual_clip,
        beta=settings.beta,
        bias_correction=settings.kl_bias_correction,
        max_completion_length=settings.max_new_tokens,
        off_policy_mask_threshold=None,
        aux_loss_enabled=settings.balance_coef > 0,
        router_aux_loss_coef=settings.balance_coef,
    )
    of_groups = advantages([total_rewards(group, settings) for group in groups], settings)
    old, of_reference = (padded(groups, others[name]) for name in ("old_log_probs", "reference_log_probs"))
    inputs = dict(prompt_ids=own[:, :0], prompt_mask=own[:, :0], completion_ids=own, completion_mask=own)
    inputs |= dict(advantages=torch.tensor(np.concatenate(of_groups)), num_items_in_batch=own.sum())
    inputs |= dict(old_per_token_logps=old, ref_per_token_logps=of_reference)
    return trainer._compute_loss(model, inputs), trl.metrics_of(trainer)


@pytest.mark.parametrize(
    "loss", ["dapo", *(pytest.param(loss, marks=pytest.mark.thorough) for loss in ("grpo", "dr_grpo", "gspo", "cispo"))]
)
def test_trl(loss, models, rng):
    theirs, ours = models
    settings, groups = SETTINGS[loss], make_groups(rng, tools=True)
    others = others_of(rng, groups)
    theirs.zero_grad()
    expected, their_metrics = loss_of_trl(settings, theirs, groups, others)
    expected.backward()
    value, metrics, found = value_and_gradients(PolicyLoss(settings), ours, packed(groups, settings, seq_len=40, **others))
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-5, atol=1e-6)
    compared = metrics.keys() & their_metrics.keys() if loss != "gspo" else {"entropy"}
    assert compared >= {"entropy"} | ({"kl", "clip_ratio/low_mean", "aux_loss"} if loss == "dapo" else set())
    for name in compared:
        np.testing.assert_allclose(metrics[name], their_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    actual = dict(export(ours.config, {path: leaf[...] for path, leaf in nnx.to_flat_state(found)}))
    wanted = hub_gradients(theirs)
    for parameter, names in by_parameter(wanted).items():
        a, b = (np.concatenate([np.ravel(g[name]) for name in names]).astype(np.float64) for g in (actual, wanted))
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), parameter
        assert np.abs(b).max() > 0, parameter


def assert_same(found, wanted, atol=1e-6):
    """Compares values, metrics and gradients."""
    (value, metrics, gradients), (other, other_metrics, others) = found, wanted
    np.testing.assert_allclose(value, other, atol=atol)
    assert metrics.keys() == other_metrics.keys()
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric, other_metrics[name], rtol=1e-5, atol=atol, err_msg=name)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        assert np.abs(np.asarray(a) - b).max() <= 10 * atol * np.abs(b).max()


FOR_SEQUENCES = replace(SETTINGS["sequences"], balance_coef=0.0, temperature=0.7)
"""Tests with these settings and rows of 160 tokens share a program."""


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def test_any_packing_and_any_micro_batches_are_the_same(model, rng):
    objective, groups = PolicyLoss(FOR_SEQUENCES), make_groups(rng, tools=True)
    others = others_of(rng, groups)
    wanted = value_and_gradients(objective, model, whole := packed(groups, FOR_SEQUENCES, seq_len=160, **others))
    # A token uses two experts in each layer, and padding none.
    assert (wanted[1]["expert_load"].sum(axis=1) == 2 * (whole["segment_ids"] != 0).sum()).all()
    batch = packed(groups, FOR_SEQUENCES, seq_len=16, multiple_of=3, **others)
    assert_same(value_and_gradients(objective, model, batch, 3), wanted)


@pytest.mark.thorough
def test_one_program_computes_any_number_of_micro_batches(model, rng):
    """Micro-batches of padding are skipped: bits equal a program's for the others alone."""
    objective, sizes = PolicyLoss(SETTINGS["dapo"]), []
    for number in (3, 6):
        groups = make_groups(rng, number, 4)
        others = others_of(rng, groups)
        used = max(2, -(-len(packed(groups, objective.settings, seq_len=32)["tokens"]) // 2))
        assert used < 6
        padded, alone = (
            packed(groups, objective.settings, seq_len=32, num_rows=2 * count, micro_batches=count, **others)
            for count in (6, used)
        )
        found = value_and_gradients(objective, model, padded, 6)
        sizes.append(_value_and_gradients._cache_size())
        wanted = value_and_gradients(objective, model, alone, used)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    assert sizes[1] - sizes[0] <= 1


def test_samples_without_weight_change_nothing(model, rng):
    """They may be anything, or absent."""
    groups = make_groups(rng)
    others, weights = others_of(rng, groups), token_weights(groups, FOR_SEQUENCES)
    batch = packed(groups, FOR_SEQUENCES, seq_len=160, **others)
    is_first = batch["sample"] == 0
    batch["loss_mask"] = jnp.where(is_first, 0, batch["loss_mask"])
    batch |= {name: jnp.where(is_first, jnp.nan, batch[name]) for name in ("sampled_log_probs", *others)}
    weights[0][0][:] = 0
    absent = packed(groups, FOR_SEQUENCES, seq_len=160, weights=weights, **others)
    assert not (absent["sample"] == 0).any()
    found, wanted = (value_and_gradients(PolicyLoss(FOR_SEQUENCES), model, each) for each in (batch, absent))
    # Experts compute tokens without weight too.
    loads = [metrics.pop("expert_load").sum() for _, metrics, _ in (found, wanted)]
    assert loads[0] > loads[1]
    assert_same(found, wanted)


@nnx.jit
def by_hand(model, batch, temperature):
    """Returns the log-probabilities of a batch, by its experts if it has some, and the experts of each token and layer."""
    ids = batch.get("expert_ids")
    replayed = None if ids is None else jnp.moveaxis(ids, 2, 0).astype(jnp.int32)
    states = model.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], expert_ids=replayed)
    log_probs = jax.nn.log_softmax(states.hidden @ model.head_weight.T / temperature)
    of_labels = jnp.take_along_axis(log_probs, batch["labels"][..., None], axis=2)[..., 0]
    return jnp.where(batch["loss_mask"] != 0, of_labels, 0), jnp.moveaxis(states.expert_ids, 0, 2).astype(jnp.uint8)


def test_experts_are_replayed_at_the_temperature_of_the_samples(model, rng):
    """The model's own experts change nothing; others give the log-probabilities of a pass with these experts."""
    batch = packed(groups := make_groups(rng, experts=(2, 2, 4), vocab=264), FOR_SEQUENCES, seq_len=160)
    scores = nnx.jit(sampled_token_scores, static_argnames="temperature")
    replayed = scores(model, batch, temperature=0.7).log_probs
    np.testing.assert_allclose(replayed, by_hand(model, batch, 0.7)[0], atol=1e-5)
    of_training = nnx.jit(train.log_probs)(model, batch)
    np.testing.assert_allclose(of_training, by_hand(model, batch, 1.0)[0], atol=1e-5)
    np.testing.assert_allclose(of_training, scores(model, batch, temperature=1.0).log_probs, atol=1e-6)
    free = {name: batch[name] for name in batch if name != "expert_ids"}
    known, own = by_hand(model, free, 0.7)
    assert np.abs(known - replayed).max() > 1e-3
    free |= dict.fromkeys(("sampled_log_probs", *others_of(rng, groups)), known)
    found, wanted = (value_and_gradients(PolicyLoss(FOR_SEQUENCES), model, each) for each in (free | {"expert_ids": own}, free))
    assert_same(found, wanted)
    assert 0 <= wanted[1]["kl"] < 1e-6
    assert wanted[1]["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.thorough
def test_exact_mode_learns_adapters_by_their_merged_matrices(rng):
    """Gradients of the factors equal the adapted model's, up to rounding; the matrices have none."""
    adapters.add_lora(model := tiny.model(), adapters.LoraSettings(rank=2, targets=("attention", "head")), rngs=nnx.Rngs(1))
    for factor in jax.tree.leaves(nnx.state(model, nnx.LoRAParam), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        factor[...] = jax.random.normal(jax.random.key(2), factor.shape) / 4
    inexact, groups = PolicySettings(), make_groups(rng, vocab=264)
    batch = packed(groups, inexact, seq_len=40)
    merged, ordinary = (
        value_and_gradients(PolicyLoss(each), model, batch)[2] for each in (replace(inexact, exact=True), inexact)
    )
    assert optax.tree.norm(ordinary) > 0
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(ordinary), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))
