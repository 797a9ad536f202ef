"""`check` reports what the passes give, and equals plain JAX on a small model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.check.report import check_checkpoint, check_model, check_random, format_report
from moe_jax.config import NAMED_CONFIGS
from moe_jax.models.auto import from_config
from moe_jax.models.random_weights import random_model
from tests.helpers import seeds, tiny


def test_the_report_equals_plain_forward_and_backward_passes():
    model = tiny.model()
    tokens = seeds.rng().integers(0, 264, 9).tolist()
    report = check_model(model, tokens, repeats=1)
    graph, params = nnx.split(model, nnx.Param)

    def plain(params):
        logits = nnx.merge(graph, params)(jnp.array([tokens])).logits
        return logits.sum(), logits

    gradients, logits = jax.jit(jax.grad(plain, has_aux=True))(params)
    gradients = jax.tree.leaves(gradients)
    assert report.next_token_id == int(logits[0, -1].argmax())
    np.testing.assert_allclose(report.logprob, jax.nn.log_softmax(logits[0, -1]).max(), rtol=1e-5)
    np.testing.assert_allclose(report.loss, logits.sum(), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(report.gradient_norm, np.sqrt(sum((np.asarray(g) ** 2).sum() for g in gradients)), rtol=1e-4)
    np.testing.assert_allclose(report.max_gradient, max(float(g.max()) for g in gradients), rtol=1e-4)
    np.testing.assert_allclose(report.min_gradient, min(float(g.min()) for g in gradients), rtol=1e-4)
    assert report.arrays_with_gradients == len(gradients)
    assert report.tensors_with_gradients == 3 + 2 * (2 + 4 + 2 + 1 + 4 * 3)
    assert report.forward_seconds > 0 and report.peak_memory_gib > 0
    assert f"Token ID: {report.next_token_id}" in format_report(report)
    assert "too short to tell" in format_report(replace(report, backward_seconds=None))


def test_a_backward_pass_takes_no_negative_time(monkeypatch):
    times = iter([2e-3, 1e-3])
    monkeypatch.setattr("moe_jax.check.report._median_seconds", lambda *_: next(times))
    assert check_model(tiny.dense(), [1, 2], repeats=1).backward_seconds is None


def test_a_prompt_begins_as_its_tokenizer_begins_a_text(tmp_path):
    tiny.tokenizer_with_a_beginning().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    report = check_checkpoint(tmp_path / "model", "a", dtype=jnp.float32, repeats=1)
    assert report.tokens == 2


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    """The refusal comes before any weights are read."""
    moe_jax.save_pretrained(tiny.dense(), tmp_path)
    monkeypatch.setattr("moe_jax.check.report.from_pretrained", None)
    with pytest.raises(ValueError, match="no tokenizer can be read from the folder"):
        check_checkpoint(tmp_path, "a")


@pytest.mark.thorough
def test_a_few_layers_of_a_published_deepseek_v3_shrunken():
    sizes = dict(hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_attention_heads=2, num_key_value_heads=2)
    sizes |= dict(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, vocab_size=50)
    config = replace(NAMED_CONFIGS["deepseek-v3"], num_hidden_layers=4, n_routed_experts=16, **sizes)
    report = check_random(config, 7, dtype=jnp.float32, repeats=1)
    assert np.isfinite(report.gradient_norm) and report.gradient_norm > 0
    # Three dense layers and one of 16 experts. The bias of the experts has no gradient.
    assert report.tensors_with_gradients == 3 + 3 * (2 + 7 + 3) + (2 + 7 + 1 + 3 + 16 * 3)
    model = nnx.eval_shape(lambda: from_config(config.without_mtp(), rngs=nnx.Rngs(0)))
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.thorough), jnp.bfloat16])
def test_random_weights_have_the_configs_spread_and_dtype(dtype):
    model = random_model(replace(tiny.model().config, hidden_size=64, vocab_size=1000), dtype)
    assert model.dtype == dtype and model.embed_tokens.weight.dtype == dtype
    assert float(model.embed_tokens.weight[...].astype(jnp.float32).std()) == pytest.approx(0.1, rel=0.02)
    experts = model.stages[0].mlp.experts.gate_up_proj[...]
    assert float(experts.astype(jnp.float32).std()) == pytest.approx(0.1, rel=0.05)
    assert bool((experts[0] != experts[1]).any()) and bool((model.norm.weight[...] == 1).all())
