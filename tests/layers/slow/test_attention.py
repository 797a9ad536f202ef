"""Attention as described by a config's `HeadsSpec`, with sinks and without. `tests/models/slow` compares gpt-oss's values."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.config import Qwen3Config
from moe_jax.layers.attention import Attention
from moe_jax.models.auto import Qwen3
from moe_jax.parallel.sequence.attention import ContextParallel


@dataclass(frozen=True, kw_only=True)
class SinksConfig(Qwen3Config):
    """A family of its own: Qwen3's fields, and heads like gpt-oss's."""

    attention_bias: bool = True

    @property
    def mixer(self):
        return replace(super().mixer, head_norms=False, sinks=True)


CONFIG = SinksConfig(
    vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, initializer_range=0.3,
)  # fmt: skip


def test_a_plain_head_has_four_matrices_alone():
    class PlainConfig(SinksConfig):
        mixer = replace(CONFIG.mixer, biases=False, sinks=False)

    attention = Attention(PlainConfig(hidden_size=32, head_dim=8), rngs=nnx.Rngs(0))
    assert {path for path, _ in nnx.to_flat_state(nnx.state(attention))} == {(f"{n}_proj", "weight") for n in "qkvo"}


def test_work_without_sinks_is_refused():
    model = nnx.eval_shape(lambda: Qwen3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="attention over devices has no sinks"):
        model.enter([[1]], context=ContextParallel())
