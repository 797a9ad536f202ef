"""Runs that learn: the loss falls, and every step is logged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.recipes import finetune
from moe_jax.train import batches, loss, open_documents
from moe_jax.train.metrics import read_records
from moe_jax.train.plots import plot_run
from tests.helpers import tiny
from tests.helpers.tiny import settings
from tests.recipes.test_finetune import held_out_text


def test_the_loss_falls_and_every_step_is_logged(tmp_path):
    result = finetune(settings(tmp_path, sequence_loss_coef=1e-4), model=tiny.biased_model(), tokenizer=tiny.tokenizer())
    assert [record["step"] for record in result.metrics] == list(range(1, 31))
    assert result.metrics[-1]["loss"] < 0.6 * result.metrics[0]["loss"]
    assert set(result.metrics[0]) == {
        "step", "loss", "aux_loss", "sequence_loss", "z_loss", "grad_norm", "learning_rate", "tokens_per_second",
        "model_tflops", "step_time", "max_mean_expert_load", "min_mean_expert_load", "num_dropped", "router_entropy",
        "num_rounds", "num_shadows", "max_expert_bias_range",
    }  # fmt: skip
    loads = read_records(tmp_path / "run" / "expert_load.jsonl")
    assert [record["step"] for record in loads] == list(range(1, 31))
    assert all(record["layers"] == [0, 1] and len(record["router_entropy"]) == 2 for record in loads)
    assert all(record["num_rounds"] == [1, 1] and record["num_shadows"] == [0, 0] for record in loads)
    bias = np.asarray(result.model.stages[0].mlp.router.expert_bias[...])
    np.testing.assert_allclose(loads[-1]["expert_bias_range"], np.stack([bias.min(axis=1), bias.max(axis=1)], axis=1))
    np.testing.assert_allclose(result.metrics[-1]["max_expert_bias_range"], np.ptp(bias, axis=1).max(), rtol=1e-6)
    assert result.metrics[-1]["sequence_loss"] > 0 and np.ptp(bias) > 0
    assert all(0 < sum(layer) <= 4 * 32 * 2 for record in loads for layer in record["expert_load"])
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.shape == (1, 4, 264)
    pictures = plot_run(tmp_path / "run", tmp_path / "pictures", step=2)
    assert [picture.name for picture in pictures] == ["loss.png", "expert_load.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_held_out_text_is_measured_and_not_trained_on(tmp_path, one_step_for_all):
    options = dict(steps=5, eval_data=held_out_text(tmp_path), eval_every=2, eval_batches=3)
    result = finetune(settings(tmp_path, **options), model=tiny.dense(), tokenizer=tiny.tokenizer())
    found = {record["step"]: record["eval_loss"] for record in result.metrics if "eval_loss" in record}
    assert sorted(found) == [2, 4, 5] and found[5] < found[2]
    stream = batches(open_documents(options["eval_data"]), tiny.tokenizer(), seq_len=32, batch_size=4)
    graph, state = nnx.split(result.model)
    losses = jax.jit(lambda state, batch: loss(nnx.merge(graph, state), batch)[1])
    parts = [losses(state, next(stream)) for _ in range(3)]
    expected = sum(p.cross_entropy for p in parts) / sum(p.num_labels for p in parts)
    np.testing.assert_allclose(found[5], expected, rtol=1e-5)
    alone = settings(tmp_path, steps=5, output=str(tmp_path / "alone"))
    alone = finetune(alone, model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert [record["loss"] for record in alone.metrics] == [record["loss"] for record in result.metrics]


def test_further_tokens_are_learned_and_logged_or_refused(tmp_path):
    model = tiny.deepseek(mtp=1, layers=1)
    with pytest.raises(ValueError, match="mtp_loss_coef=0 would leave the model's MTP modules"):
        finetune(settings(tmp_path, mtp_loss_coef=0), model=model, tokenizer=tiny.tokenizer())
    result = finetune(settings(tmp_path, steps=12), model=model, tokenizer=tiny.tokenizer())
    losses = [record["mtp_loss"] for record in result.metrics]
    assert losses[-1] < 0.9 * losses[0] and result.model.config.num_nextn_predict_layers == 1
    assert len(read_records(tmp_path / "run" / "expert_load.jsonl")[0]["expert_load"]) == 1
