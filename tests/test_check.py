"""`check` reports what the passes give, and equals plain JAX on a small model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from moe_jax.check import check_model, format_report, random_model


def test_the_report_is_that_of_the_plain_passes():
    model = tiny.model()
    tokens = np.random.default_rng().integers(0, 264, 9).tolist()
    report = check_model(model, tokens, repeats=1)
    graph, params = nnx.split(model, nnx.Param)
    logits = model(jnp.array([tokens])).logits
    gradients = jax.tree.leaves(jax.grad(lambda p: nnx.merge(graph, p)(jnp.array([tokens])).logits.sum())(params))
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_weights_have_the_configs_spread_and_dtype(dtype):
    model = random_model(replace(tiny.model().config, hidden_size=64, vocab_size=1000), dtype)
    assert model.dtype == dtype and model.embed_tokens.weight.dtype == dtype
    assert float(model.embed_tokens.weight[...].astype(jnp.float32).std()) == pytest.approx(0.1, rel=0.02)
    experts = model.stages[0].mlp.experts.gate_up_proj[...]
    assert float(experts.astype(jnp.float32).std()) == pytest.approx(0.1, rel=0.05)
    assert bool((experts[0] != experts[1]).any()) and bool((model.norm.weight[...] == 1).all())
