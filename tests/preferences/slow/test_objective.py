"""The objective equals TRL's trainers: losses, metrics and the gradient of every parameter, on the same examples."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.checkpoint.hf_names import export
from moe_jax.preferences import Preference, PreferenceSettings, reference_log_probs
from moe_jax.train import gradients_fn
from tests.helpers import seeds
from tests.helpers import trl_reference as trl
from tests.helpers.examples import concatenated_inputs, make_answers, make_pairs, packed_batch, trl_inputs
from tests.helpers.hf_reference import by_parameter, hub_gradients, load_ours, reference

SETTINGS = {
    "dpo": PreferenceSettings("dpo", beta=0.3),
    "ipo": PreferenceSettings("ipo", beta=0.3),
    "orpo": PreferenceSettings("orpo", beta=0.3),
    "simpo": PreferenceSettings("simpo", beta=1.5, gamma=0.6),
    "kto": PreferenceSettings("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.6),
}
METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "log_prob_chosen": "logps/chosen",
    "log_prob_rejected": "logps/rejected",
    "kl": "kl",
    "chosen_cross_entropy": "nll_loss",
    "aux_loss": "aux_loss",
}
"""Our metrics and TRL's."""


@pytest.fixture(scope="module")
def models():
    """Two dense models of transformers and ours of the same weights: the policy and its reference."""
    theirs = [reference("qwen3", seeds.integer(), num_hidden_layers=2) for _ in range(2)]
    ours = [load_ours(model) for model in theirs]
    return [trl.with_fused_head(model) for model in theirs], ours


def loss_of_trl(loss, examples, policy, of_reference, settings):
    """Returns TRL's loss, with a graph, and its metrics."""
    if loss in ("orpo", "simpo"):
        trainer = trl.orpo_trainer(0.3) if loss == "orpo" else trl.cpo_trainer("simpo", 1.5, gamma=0.6)
        return trainer.get_batch_loss_metrics(policy, concatenated_inputs(examples))
    if loss == "kto":
        trainer = trl.kto_trainer(0.3, (settings.desirable_weight, settings.undesirable_weight), of_reference)
        inputs = trl_inputs([example.texts[0] for example in examples])
        inputs |= trl_inputs([example.mismatched for example in examples], "KL_")
        inputs["label"] = torch.tensor([example.desirable for example in examples])
    else:
        trainer = trl.dpo_trainer({"dpo": "sigmoid"}.get(loss, loss), 0.3, of_reference)
        inputs = trl_inputs([example.texts[i] for i in (0, 1) for example in examples])
    if settings.aux_loss_coef:
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, settings.aux_loss_coef
    return trainer._compute_loss(policy, inputs, False), trl.metrics_of(trainer)


def compare(loss, models, settings, **packing):
    """Compares value, metrics and gradients of one loss."""
    (policy, of_reference), (ours, our_reference) = models
    examples = make_answers() if loss == "kto" else make_pairs()
    policy.zero_grad()
    expected, their_metrics = loss_of_trl(loss, examples, policy, of_reference, settings)
    expected.backward()

    batch = packed_batch(examples, **packing)
    if settings.needs_reference:
        batch["reference_log_probs"] = nnx.jit(reference_log_probs)(our_reference, batch)
    objective = Preference(settings)
    graph, params, fixed = nnx.split(ours, nnx.Param, ...)
    gradients = nnx.jit(gradients_fn(objective, graph))
    value, aux, found = gradients(params, fixed, objective.prepare(batch, jnp.ones(())))
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-5)
    metrics = objective.metrics(value, aux, jnp.ones(()))
    for name, theirs in METRICS.items():
        if name in metrics and theirs in their_metrics:
            np.testing.assert_allclose(metrics[name], their_metrics[theirs], rtol=1e-4, atol=1e-5, err_msg=name)
    assert ("kl" in metrics) == settings.needs_reference
    # TRL logs no load of experts, and no divergence of pairs.
    ours_alone = {"loss", "expert_load"} | ({"kl"} if settings.of_pairs else set())
    assert {METRICS[name] for name in metrics if name not in ours_alone} <= {*their_metrics}
    actual = dict(export(ours.config, {path: leaf[...] for path, leaf in nnx.to_flat_state(found)}))
    wanted = hub_gradients(policy)
    assert actual.keys() == wanted.keys()
    for parameter, names in by_parameter(wanted).items():
        a, b = (np.concatenate([np.ravel(g[name]) for name in names]).astype(np.float64) for g in (actual, wanted))
        error, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert size > 0 and error <= 1e-5 * size, f"{parameter}: relative error {error / max(size, 1e-300):.1e}"


@pytest.mark.parametrize(
    "loss", ["orpo", "kto", *(pytest.param(loss, marks=pytest.mark.thorough) for loss in ("dpo", "ipo", "simpo"))]
)
def test_trl(loss, models):
    compare(loss, models, SETTINGS[loss])


def test_trl_with_experts():
    """DPO of a mixture of experts with its load-balancing loss."""
    theirs = [reference("qwen3_moe", seeds.integer(), num_hidden_layers=2) for _ in range(2)]
    ours = [load_ours(model) for model in theirs]
    models = [trl.with_fused_head(model) for model in theirs], ours
    compare("dpo", models, PreferenceSettings("dpo", beta=0.3, aux_loss_coef=0.2))
