"""config.json in both dialects becomes the same config, and anything not understood is refused by name."""

import json

import pytest
import transformers

from moe_jax.config import (
    NAMED_CONFIGS,
    Qwen3Config,
    Qwen3MoeConfig,
    RopeParameters,
    Stage,
    config_from_dict,
    config_to_dict,
    load_config,
)

HUB_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def test_the_hub_file_of_30b_is_the_named_config():
    config = config_from_dict(HUB_30B)
    assert config.rope_parameters == RopeParameters(rope_theta=1e6)
    assert config_to_dict(config) | {"sliding_window": 4096} == config_to_dict(NAMED_CONFIGS["qwen3-30b-a3b"])
    assert config.stages == (Stage(0, 48, sparse=True),)
    assert config.layer_windows == (None,) * 48


@pytest.mark.parametrize(
    "theirs",
    [
        transformers.Qwen3MoeConfig(num_experts=8, mlp_only_layers=[1], rope_theta=5e6, use_sliding_window=True),
        transformers.Qwen3MoeConfig(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        ),
        transformers.Qwen3Config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e7}),
        transformers.Qwen3Config(num_hidden_layers=30, use_sliding_window=True, sliding_window=128, eos_token_id=[3, 4]),
    ],
    ids=["moe", "moe-yarn", "dense-dynamic", "dense-sliding"],
)
def test_what_transformers_writes_is_read_and_what_we_write_it_reads(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    assert ours.rope_parameters.rope_theta == theirs.rope_parameters["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(ours)))
    back = transformers.AutoConfig.from_pretrained(tmp_path)
    for name, value in theirs.to_dict().items():
        if name not in ("dtype", "architectures", "_name_or_path", "transformers_version"):
            assert getattr(back, name) == value, name
    assert load_config(tmp_path) == ours


def test_old_and_current_names_mean_the_same():
    old = {**HUB_30B, "rope_scaling": {"type": "linear", "factor": 2.0}}
    current = {k: v for k, v in HUB_30B.items() if k not in ("num_experts", "rope_theta", "rope_scaling")}
    current |= {"num_local_experts": 128, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    assert config_from_dict(old) == config_from_dict(current)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported are qwen3, qwen3_moe"),
        ({"n_group": 4, "new_field": 1}, "unknown field n_group=4; unknown field new_field=1"),
        ({"quantization_config": {"bits": 4}}, "unknown field quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "odd": 3}}, "unknown rope field odd=3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 5}, "no multiple of num_key_value_heads=5"),
        ({"num_experts_per_tok": 129}, "between 1 and num_experts=128"),
        ({"num_local_experts": 64}, "contradicts num_experts=128"),
        ({"hidden_size": "big"}, "hidden_size='big' must be a positive integer"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**HUB_30B, **change})


def test_layers_of_one_kind_form_stages():
    config = Qwen3MoeConfig(num_hidden_layers=6, mlp_only_layers=(0, 1, 4))
    assert config.moe_layers == (2, 3, 5)
    assert config.stages == (Stage(0, 2, False), Stage(2, 2, True), Stage(4, 1, False), Stage(5, 1, True))
    assert Qwen3MoeConfig(num_hidden_layers=6, decoder_sparse_step=3).moe_layers == (2, 5)


def test_upper_layers_slide_in_a_dense_model():
    config = Qwen3Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    assert config.layer_windows == (None, None, 7, 7)


def test_a_missing_or_broken_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_config(tmp_path)
