"""A policy refuses settings that its model does not support, before an engine is started."""

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax import adapters
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.request import EngineLimits
from moe_jax.train import make_optimizer
from tests.helpers import tiny
from tests.serving.slow.test_strict_gradients import DENSE

LIMITS = EngineLimits(max_sequences=2, max_tokens_per_step=16, max_chunks_per_step=2, max_length=32, num_pages=8)


@pytest.mark.parametrize(
    "settings, options, message",
    [
        ({"exact": True}, {}, "exact=True: strict bits are not computed for this model: .*; or set exact=False"),
        ({"beta": 0.1}, {}, "beta=0.1 needs a reference: train adapters"),
        ({}, {"seq_len": 31}, "seq_len=31 must be at least 32"),
        ({}, {"on_mismatch": "stopp"}, 'on_mismatch must be "stop" or "warn"; got \'stopp\''),
    ],
)
def test_refused_settings(settings, options, message):
    with pytest.raises(ValueError, match=message):
        Policy(tiny.dense(), make_optimizer(1e-3), PolicySettings(**settings), tokenizer=None, limits=LIMITS, **options)


def test_exact_mode_refuses_adapters():
    model = moe_jax.from_config(DENSE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    adapters.add_lora(model, adapters.LoraSettings(rank=2), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="strict bits are not computed for this model: it has adapters"):
        Policy(model, make_optimizer(1e-3), PolicySettings(exact=True), tokenizer=None, limits=LIMITS)
