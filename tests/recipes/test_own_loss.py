"""A user's loss in place of `train.loss`: the same step around it, its metrics, extra arrays, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.models.execution import Execution
from moe_jax.recipes import finetune
from moe_jax.train import (
    init_state,
    log_probs,
    log_probs_and_entropies,
    make_optimizer,
    make_train_step,
    mean_over_devices,
    sum_over_devices,
)
from tests.helpers import seeds, tiny


def make_batch(rows=4, length=12):
    """Random tokens; the rows differ in their number of labels."""
    rng = seeds.rng()
    mask = np.tile([1] * 7 + [0] + [1] * 2 + [0] * 2, (rows, 1))
    mask[0, 3:] = 0
    arrays = dict(tokens=rng.integers(0, 264, (rows, length)), labels=rng.integers(0, 264, (rows, length)), loss_mask=mask)
    arrays |= dict(segment_ids=np.tile([1] * 8 + [2] * 3 + [0], (rows, 1)))
    arrays["positions"] = np.tile([*range(8), *range(3), 0], (rows, 1))
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def cross_entropy(model, batch):
    found = log_probs(model, batch)
    mean = sum_over_devices(model, found.sum()) / batch["num_labels"]
    return -mean, {"mean_log_prob": mean}


def one_step(batch, make_model=tiny.dense, **options):
    model, optimizer = make_model(), make_optimizer(1e-2)
    return make_train_step(nnx.graphdef(model), optimizer, **options)(init_state(model, optimizer), batch)


def test_log_probs_equal_all_logits():
    """Log-probabilities equal the log-softmax of all logits, and are 0 without a label."""
    batch, model = make_batch(), tiny.dense()
    logits = nnx.jit(lambda model: model(batch["tokens"], batch["positions"], batch["segment_ids"]).logits)(model)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    found = log_probs(model, batch | {"labels": jnp.where(batch["loss_mask"] == 1, batch["labels"], -100)})
    np.testing.assert_allclose(found, np.where(batch["loss_mask"] == 1, -losses, 0), rtol=1e-5, atol=1e-6)
    both, distribution = log_probs_and_entropies(model, batch), jax.nn.log_softmax(logits)
    np.testing.assert_array_equal(both.log_probs, log_probs(model, batch))
    entropies = np.where(batch["loss_mask"] == 1, -(jnp.exp(distribution) * distribution).sum(-1), 0)
    np.testing.assert_allclose(both.entropies, entropies, rtol=1e-5, atol=1e-6)
    without_positions = {name: array for name, array in batch.items() if name != "positions"}
    np.testing.assert_array_equal(log_probs(model, without_positions), log_probs(model, batch))


def weighted_cross_entropy(model, batch):
    found = log_probs(model, batch) * batch["loss_mask"]
    mean = sum_over_devices(model, found.sum()) / batch["label_weight"]
    return -mean, {"mean_log_prob": mean}


@pytest.mark.parametrize(
    "function, make_model",
    [(weighted_cross_entropy, tiny.dense), pytest.param(cross_entropy, tiny.model, marks=pytest.mark.thorough)],
)
def test_cross_entropy_as_own_loss(function, make_model):
    """Cross-entropy as a user's loss takes the built-in loss's step, also where labels have weights."""
    batch = make_batch()
    if function is weighted_cross_entropy:
        batch["loss_mask"] = batch["loss_mask"] * jnp.linspace(0.01, 0.1, 12, dtype=jnp.float32)
    own, own_metrics = one_step(batch, make_model, loss=function, gradient_accumulation=2)
    built_in, metrics = one_step(batch, make_model, gradient_accumulation=2)
    for name in ("loss", "total_loss", "grad_norm", "num_labels", "num_tokens"):
        np.testing.assert_allclose(own_metrics[name], metrics[name], rtol=1e-5, err_msg=name)
    assert own_metrics.keys() == {"loss", "total_loss", "grad_norm", "num_labels", "num_tokens", "mean_log_prob"}
    difference = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), own.params, built_in.params)
    assert max(jax.tree.leaves(difference)) < 1e-3


def test_means_over_micro_batches():
    """Scalars are means over micro-batches, and further arrays of the batch arrive."""
    seen = {}

    def loss(model, batch):
        seen.update(execution=model.execution, shapes={name: array.shape for name, array in batch.items()})
        rewards = mean_over_devices(model, batch["reward"].mean())
        return (model.embed_tokens.weight[...] ** 2).mean() + rewards, {"reward": rewards, "loss": 2 * rewards}

    batch = {"tokens": jnp.ones((4, 3), jnp.int32), "reward": jnp.asarray([1.0, 2.0, 3.0, 6.0])}
    _, metrics = one_step(batch, loss=loss, gradient_accumulation=2, remat=False)
    assert float(metrics["reward"]) == 3 and float(metrics["loss"]) == 6 and "num_labels" not in metrics
    assert seen == {"execution": Execution(remat=False), "shapes": {"tokens": (2, 3), "reward": (2,)}}


@pytest.mark.parametrize(
    "result, message",
    [
        (jnp.zeros(()), r"loss must return \(a scalar, a dict of scalars\); got"),
        ((jnp.zeros(3), {}), r"loss must return scalars; its value has shape \[3\]"),
        ((jnp.zeros(()), {"margin": jnp.zeros(3)}), r"loss must return scalars; margin has shape \[3\]"),
        ((jnp.zeros(()), {"margin": "wide"}), "loss must return scalars; margin is a str"),
        ((jnp.zeros(()), {"margin": {"of": 1.0}}), "loss must return scalars; margin is a dict"),
        ((jnp.zeros(()), {"grad_norm": jnp.zeros(())}), r"metric\(s\) grad_norm, which a step has already"),
    ],
)
def test_other_results_are_refused(result, message):
    with pytest.raises(ValueError, match=message):
        one_step({"tokens": jnp.ones((4, 3), jnp.int32)}, loss=lambda model, batch: result)


def test_what_a_loss_takes_the_place_of_is_refused_beside_it():
    with pytest.raises(TypeError, match="z_loss_coef"):
        one_step(make_batch(), loss=cross_entropy, z_loss_coef=0.1)
    with pytest.raises(ValueError, match="MTP modules, which `loss` does not train"):
        one_step(make_batch(), lambda: tiny.deepseek(mtp=1), loss=cross_entropy)


def with_mesh_axes(model, batch, *, mesh_axes, **options):
    return log_probs(model, batch).sum(), {}


@pytest.mark.parametrize("function", [with_mesh_axes, lambda model: None, lambda model, batch, scale: None])
def test_a_function_of_another_form_is_told_the_new_one(function):
    with pytest.raises(TypeError, match=r"loss must be a function loss\(model, batch\) -> .* takes .*sum_over_devices"):
        one_step({"tokens": jnp.ones((4, 3), jnp.int32)}, loss=function)


def test_finetune_with_own_loss(tmp_path):
    """A run minimises a user's loss, logs its metrics, and resumes only with this loss."""
    records, options = [], dict(model=tiny.dense(), tokenizer=tiny.tokenizer())
    settings = tiny.settings(tmp_path, steps=4, batch_size=2)
    result = finetune(settings, **options, loss=cross_entropy, on_step=records.append, stop_after=3)
    assert records == result.metrics and [record["step"] for record in records] == [1, 2, 3]
    assert set(records[0]) == {
        *("step", "loss", "mean_log_prob", "grad_norm", "learning_rate", "tokens_per_second", "model_tflops", "step_time")
    }
    assert records[2]["loss"] < records[0]["loss"]
    np.testing.assert_allclose(records[0]["mean_log_prob"], -records[0]["loss"], rtol=1e-5)
    options["model"] = tiny.dense()
    with pytest.raises(ValueError, match="loss: checkpoint 'cross_entropy', now none"):
        finetune(settings, **options)


@pytest.mark.parametrize(
    "make_model, changes, message",
    [
        (tiny.dense, dict(z_loss_coef=0.1), "built-in loss, which alone has the factors z_loss_coef=0.1"),
        (lambda: tiny.deepseek(mtp=1), {}, "MTP modules, which `loss` does not train"),
    ],
)
def test_finetune_refuses_before_anything_is_written(tmp_path, make_model, changes, message):
    settings = tiny.settings(tmp_path, steps=2, **changes)
    with pytest.raises(ValueError, match=message):
        finetune(settings, model=make_model(), tokenizer=tiny.tokenizer(), loss=cross_entropy)
    assert not (tmp_path / "run").exists()
