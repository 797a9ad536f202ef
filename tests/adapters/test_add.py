"""Targets get adapters of their ranks, other names are refused, and a new adapter changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, lora_summary
from moe_jax.adapters.names import targets_of
from moe_jax.layers.lora import Frozen
from tests.helpers import tiny
from tests.helpers.adapted_models import logits_of, small_model, with_adapters

TOKENS = jnp.arange(12).reshape(2, 6)


def test_a_new_adapter_changes_nothing():
    model = small_model("qwen3_moe")
    before, weights = logits_of(model, TOKENS), jax.tree.leaves(nnx.state(model, nnx.Param))
    add_lora(model, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(logits_of(model, TOKENS), before)
    frozen = jax.tree.leaves(nnx.state(model, Frozen))
    assert {id(a) for a in frozen} == {id(a) for a in weights}


def test_experts_share_the_rank():
    model = small_model("qwen3_moe")
    summary = add_lora(model, LoraSettings(rank=32), rngs=nnx.Rngs(0))
    k = model.config.experts.num_experts_per_tok
    ranks = {target.kind: target.found.rank for target in targets_of(model) if target.found is not None}
    assert ranks == {"attention": 32, "experts": 32 // k}
    assert str(32 // k) in str(summary) and "experts" in str(summary) and str(lora_summary(model)) == str(summary)
    assert sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param))) == sum(
        kind.parameters for kind in summary.kinds.values()
    )


def test_targets_and_ranks():
    model = small_model("qwen3_moe", mlp_only_layers=[1])
    add_lora(model, LoraSettings(targets=("q_proj", "mlp", "router"), ranks={"mlp": 3, "q_proj": 5}), rngs=nnx.Rngs(0))
    found = {target.name: target.found.rank for target in targets_of(model) if target.found is not None}
    assert found == {"q_proj": 5, "gate_proj": 3, "up_proj": 3, "down_proj": 3, "router": 32}


def test_shared_outer():
    model = with_adapters(small_model("qwen3_moe"), shared_outer=True)
    gate_up, down = (target.found for target in targets_of(model) if target.kind == "experts")
    experts = model.config.experts.num_experts
    assert (gate_up.a.shape[1], gate_up.b.shape[1], down.a.shape[1], down.b.shape[1]) == (1, experts, experts, 1)


def test_a_head_in_bf16_does_not_round_its_adapter(rng):
    model = with_adapters(tiny.dense(param_dtype=jnp.bfloat16), targets=("head",))
    adapter = model.lm_head.lora
    b = jnp.asarray(rng.normal(size=adapter.b.shape), jnp.float32)
    adapter.b.set_value(b)
    appended = model.head_weight[:, model.config.hidden_size :][:, : adapter.rank]
    np.testing.assert_array_equal(appended, adapter.scale * b[0])


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(targets=("experts", "wq")), "'wq', which this model does not have"),
        (dict(ranks={"wq": 3}), "ranks has 'wq'"),
    ],
)
def test_unknown_names(settings, message):
    model = small_model("qwen3_moe")
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraSettings(**settings), rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(model, Frozen))


def test_refused_models():
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(with_adapters(small_model("qwen3")), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mtp=False"):
        add_lora(tiny.deepseek(mtp=1), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "settings", [dict(rank=0), dict(alpha=0), dict(targets=()), dict(targets="experts"), dict(ranks={"mlp": 0})]
)
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LoraSettings(**settings)
