"""A family with sinks, biases, windows and another activation needs its own files alone (tests/toy_gpt_oss.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from toy_gpt_oss import GptOss, GptOssConfig, parameters_of

import moe_jax

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, sliding_window=4)
LAYER_TYPES = ("sliding_attention", "full_attention", "sliding_attention")


@pytest.fixture
def theirs(rng):
    """transformers' model, with a router without a bias, and experts whose activation reaches its limits."""
    options = dict(num_local_experts=4, num_experts_per_tok=2, layer_types=list(LAYER_TYPES), attn_implementation="eager")
    config = transformers.GptOssConfig(**SIZES, **options, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = transformers.GptOssForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        scale = 0 if name.endswith("router.bias") else 3 if "gate_up_proj" in name else 0.3
        offset = 1 if name.endswith("norm.weight") else 0
        parameter.data = torch.tensor(offset + scale * rng.normal(size=parameter.shape), dtype=torch.float32)
    return model


def test_logits_and_gradients_equal_those_of_transformers(theirs, rng):
    config = GptOssConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        layer_types=LAYER_TYPES, use_sliding_window=True,
    )  # fmt: skip
    ours = GptOss(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    state = nnx.state(ours, nnx.Param)
    values = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, parameters_of(values)))
    nnx.update(ours, state)
    tokens = rng.integers(0, SIZES["vocab_size"], size=(2, 12))
    direction = rng.normal(size=(2, 12, SIZES["vocab_size"])).astype(np.float32)
    graph, params = nnx.split(ours)

    @jax.jit
    def value(params):
        logits = nnx.merge(graph, params)(jnp.asarray(tokens)).logits
        return jnp.sum(logits * direction), logits

    (_, logits), gradients = jax.value_and_grad(value, has_aux=True)(params)
    expected = theirs(torch.tensor(tokens)).logits
    (expected * torch.tensor(direction)).sum().backward()
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-3, atol=1e-3)
    wanted = parameters_of({name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None})
    for path, leaf in jax.tree.leaves_with_path(wanted):
        actual = nnx.to_pure_dict(gradients)
        for key in path:
            actual = actual[key.key]
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(actual / scale, leaf / scale, atol=2e-4, err_msg=jax.tree_util.keystr(path))
    new = np.array(moe_jax.generate(ours, jnp.asarray(tokens[:, :5]), max_new_tokens=4, temperature=0.0))
    sequences = np.concatenate([tokens[:, :5], new], axis=1)
    best = jnp.argmax(jax.jit(lambda params: nnx.merge(graph, params)(sequences).logits)(params), axis=-1)
    np.testing.assert_array_equal(new, best[:, 4:-1])
