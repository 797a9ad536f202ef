"""Attention as described by a config's `HeadsSpec`: with biases and sinks, and without norms of heads, it equals gpt-oss's."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.gpt_oss import modeling_gpt_oss

import moe_jax
from moe_jax.config import Qwen3Config
from moe_jax.layers.attend import Attend
from moe_jax.layers.attention import Attention
from moe_jax.layers.rope import rope_tables
from moe_jax.models.auto import Qwen3
from moe_jax.parallel.sequence.attention import ContextParallel
from tests.helpers import seeds


@dataclass(frozen=True, kw_only=True)
class SinksConfig(Qwen3Config):
    """A family of its own: Qwen3's fields, and heads as gpt-oss has them."""

    attention_bias: bool = True

    @property
    def mixer(self):
        return replace(super().mixer, head_norms=False, sinks=True)


CONFIG = SinksConfig(
    vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, initializer_range=0.3,
)  # fmt: skip


def with_random_vectors(module):
    """Returns the module with random biases and sinks, which begin with zeros."""
    rng = seeds.rng()

    for path, vector in nnx.to_flat_state(nnx.state(module)):
        if path[-1] in ("bias", "sinks"):
            vector[...] = rng.normal(size=vector.shape).astype(np.float32)
    assert all(np.abs(vector[...]).max() > 0 for _, vector in nnx.to_flat_state(nnx.state(module)))
    return module


@pytest.mark.parametrize("window", [None, 3])
def test_outputs_and_gradients_are_those_of_gpt_oss(rng, window):
    ours = with_random_vectors(Attention(CONFIG, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(ours)
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
    config = transformers_config(**sizes)
    theirs = modeling_gpt_oss.GptOssAttention(config, 1)
    flat = {".".join(path): np.array(a[...]) for path, a in nnx.to_flat_state(params)}
    theirs.load_state_dict({name: torch.tensor(a) for name, a in flat.items()})

    x, direction = (rng.normal(size=(2, 6, 32)).astype(np.float32) for _ in range(2))
    tables = rope_tables(jnp.tile(jnp.arange(6), (2, 1)), CONFIG.rope_parameters, 8, 64)

    @jax.jit
    def forward(params, x):
        attend = Attend(jnp.ones((2, 6), jnp.int32), jnp.int32(0), window)
        out, _ = nnx.merge(graph, params)(x, tables, attend)
        return jnp.sum(out * direction), out

    (_, out), gradients = jax.value_and_grad(forward, argnums=(0, 1), has_aux=True)(params, x)
    index = np.arange(6)
    hidden = (index > index[:, None]) | (index <= index[:, None] - (window or 6))
    mask = torch.tensor(np.where(hidden, -np.inf, 0)[None, None].astype(np.float32))
    given = torch.tensor(x, requires_grad=True)
    cos, sin = (torch.tensor(np.array(a)) for a in (tables.cos, tables.sin))
    expected, _ = theirs(given, (cos, sin), mask)
    (expected * torch.tensor(direction)).sum().backward()

    np.testing.assert_allclose(out, expected.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[1], given.grad, rtol=1e-4, atol=1e-4)
    named = dict(theirs.named_parameters())
    found = {".".join(path): a[...] for path, a in nnx.to_flat_state(gradients[0])}
    assert found.keys() == named.keys() and {"sinks", "o_proj.bias"} < found.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, named[name].grad, rtol=1e-4, atol=1e-4, err_msg=name)


def transformers_config(**sizes):
    config = modeling_gpt_oss.GptOssConfig(**sizes, attention_bias=True)
    config._attn_implementation = "eager"
    return config


def test_a_plain_head_has_four_matrices_alone():
    class PlainConfig(SinksConfig):
        mixer = replace(CONFIG.mixer, biases=False, sinks=False)

    attention = Attention(PlainConfig(hidden_size=32, head_dim=8), rngs=nnx.Rngs(0))
    assert {path for path, _ in nnx.to_flat_state(nnx.state(attention))} == {(f"{n}_proj", "weight") for n in "qkvo"}


@pytest.fixture(scope="module")
def model():
    return with_random_vectors(Qwen3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def test_greedy_tokens_with_sinks_are_those_of_whole_sequences(model, rng):
    prompts = [rng.integers(0, 97, length).tolist() for length in (4, 2)]
    forward = jax.jit(lambda tokens: model(tokens).logits)
    for prompt, new in zip(prompts, moe_jax.generate(model, prompts, max_new_tokens=3), strict=True):
        for _ in range(3):
            padded = np.array([[*prompt, *[0] * (7 - len(prompt))]])
            prompt.append(int(forward(padded)[0, len(prompt) - 1].argmax()))
        assert new == prompt[-3:]


def test_work_without_sinks_is_refused(model):
    with pytest.raises(ValueError, match="attention over devices has no sinks"):
        model.enter([[1]], context=ContextParallel())
