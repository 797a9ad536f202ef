"""The counts of the published models, and of a real model's arrays."""

import math

import jax
import pytest
from flax import nnx

from moe_jax.checkpoint.hf_names import hf_tensors
from moe_jax.config import NAMED_CONFIGS, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig
from moe_jax.cost.flops import forward_flops_per_token, num_active_parameters, num_parameters, training_flops_per_token
from moe_jax.models.auto import from_config


@pytest.mark.parametrize(
    "config",
    [
        *{type(config): config for config in NAMED_CONFIGS.values()}.values(),
        Qwen3MoeConfig(num_hidden_layers=5, mlp_only_layers=(1,), attention_bias=True, tie_word_embeddings=True),
        Qwen3Config(attention_bias=True),
        DeepseekV3Config(num_hidden_layers=4, q_lora_rank=None, attention_bias=True, n_shared_experts=0, moe_layer_freq=2),
        DeepseekV3Config(num_hidden_layers=2, num_nextn_predict_layers=2, tie_word_embeddings=True),
    ],
)
def test_parameters_are_those_of_the_model(config):
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_qwen3_30b_a3b():
    config = NAMED_CONFIGS["qwen3-30b-a3b"]
    assert num_parameters(config) / 1e9 == pytest.approx(30.53, abs=0.01)
    assert num_active_parameters(config) / 1e9 == pytest.approx(3.35, abs=0.01)
    assert training_flops_per_token(config, 4096) / 1e9 == pytest.approx(23.1, abs=0.1)


def test_deepseek_v3():
    config = NAMED_CONFIGS["deepseek-v3"]
    assert num_parameters(config.without_mtp()) / 1e9 == pytest.approx(671.03, abs=0.01)
    assert num_active_parameters(config) / 1e9 == pytest.approx(37.55, abs=0.01)
    # A key costs 2 * 128 heads * (192 + 128), and a token sees 2048 of them; the embedding table is no matmul.
    scores = 61 * 2 * 128 * (192 + 128) * 2048
    matmuls = 2 * (num_active_parameters(config) - 129280 * 7168)
    assert forward_flops_per_token(config, 4096) == pytest.approx(matmuls + scores, rel=1e-4)


def test_the_module_of_deepseek_v3_that_predicts_a_further_token():
    config = NAMED_CONFIGS["deepseek-v3"]
    plain = config.without_mtp()
    # Published: 11.5e9 in its layer, 2.4e9 active with the shared embedding and head; 685e9 in the files,
    # which hold shared weights twice.
    own = num_parameters(config) - num_parameters(plain) - 2 * 7168 * 7168
    assert own / 1e9 == pytest.approx(11.5, abs=0.01)
    assert sum(math.prod(tensor.shape) for tensor in hf_tensors(config)) / 1e9 == pytest.approx(684.5, abs=0.1)
    more = training_flops_per_token(config, 4096) - training_flops_per_token(plain, 4096)
    scores = 2 * 128 * (192 + 128) * 2048
    assert ((more / 3 - scores) / 2 - 2 * 7168 * 7168 + 129280 * 7168) / 1e9 == pytest.approx(2.4, abs=0.05)
    assert num_active_parameters(config) == num_active_parameters(plain)
    assert forward_flops_per_token(config, 4096) == forward_flops_per_token(plain, 4096)


def test_a_sliding_window_bounds_the_keys():
    whole = Qwen3Config()
    sliding = Qwen3Config(use_sliding_window=True, sliding_window=128, max_window_layers=0)
    saved = forward_flops_per_token(whole, 4096) - forward_flops_per_token(sliding, 4096)
    assert saved == 32 * 4 * 32 * 128 * (2048 - 128)
