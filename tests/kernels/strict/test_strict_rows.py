"""Strict kernels on rows compute the documented formulas, and a row's bits depend on that row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.strict import rows as strict_rows
from moe_jax.kernels.strict.rows import gated_silu, log_sum_exp, norm_rows
from moe_jax.layers.linear import rms_norm
from tests.helpers import seeds


def check(function, x, expected, rtol):
    found = np.asarray(function(x))
    np.testing.assert_allclose(found.astype(np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=1e-6)
    np.testing.assert_array_equal(function(x[:1]), found[:1])
    np.testing.assert_array_equal(function(x[::-1]), found[::-1])


def test_norm():
    rng = seeds.rng()
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((5, 256), (256,)))
    check(lambda x: norm_rows(x, weight, eps=1e-6), x, rms_norm(x, weight, 1e-6), rtol=2**-7)


def test_gate(monkeypatch):
    monkeypatch.setattr(strict_rows, "PART", 256)
    h = jnp.asarray(seeds.rng().normal(size=(3, 2 * 640)), jnp.float32)
    check(lambda h: gated_silu(h, dtype=jnp.bfloat16), h, jax.nn.silu(h[:, :640]) * h[:, 640:], rtol=2**-8)


@pytest.mark.parametrize("vocab", [128, 640])
def test_log_sum_exp(monkeypatch, vocab):
    monkeypatch.setattr(strict_rows, "PART", 256)
    logits = 30 * jnp.asarray(seeds.rng().normal(size=(3, vocab)), jnp.float32)
    check(log_sum_exp, logits, np.log(np.exp(np.asarray(logits, np.float64)).sum(axis=1)), rtol=1e-6)


def test_refused_vocabulary():
    with pytest.raises(ValueError, match="multiple of 128"):
        log_sum_exp(jnp.zeros((1, 100)))
