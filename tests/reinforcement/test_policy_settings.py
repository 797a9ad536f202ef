"""A policy refuses settings that its model does not support, before an engine is started."""

import pytest
from flax import nnx

from moe_jax import adapters
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.request import EngineLimits
from moe_jax.train import make_optimizer
from tests.helpers import tiny

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


@pytest.mark.parametrize(
    "make, lora, message",
    [
        (tiny.model, {}, "a copy of all experts would need too much memory: give lora.targets without experts"),
        (tiny.dense, {"dropout": 0.1}, "exact=True needs lora.dropout=0"),
    ],
)
def test_exact_mode_refuses_adapters_that_it_cannot_merge(make, lora, message):
    adapters.add_lora(model := make(), adapters.LoraSettings(rank=2, **lora), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=message):
        Policy(model, make_optimizer(1e-3), PolicySettings(exact=True), tokenizer=None, limits=LIMITS)
