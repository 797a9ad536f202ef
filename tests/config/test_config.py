"""config.json in both dialects becomes the same config, and anything not understood is refused by name."""

import json

import pytest
import transformers

from moe_jax.config import (
    NAMED_CONFIGS,
    DeepseekV3Config,
    LayerKind,
    Qwen3Config,
    Qwen3MoeConfig,
    RopeParameters,
    Stage,
    config_from_dict,
    config_to_dict,
    load_config,
)
from moe_jax.config.base import _stages

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


HUB_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def alike(config, first_layer, num_layers, sparse):
    """The stage of layers that all attend alike."""
    return Stage(first_layer, num_layers, (LayerKind(config.mixer, sparse),))


def test_the_hub_file_of_deepseek_v3_is_the_named_config():
    config = config_from_dict(HUB_DEEPSEEK_V3)
    assert config == NAMED_CONFIGS["deepseek-v3"]
    assert config.stages == (alike(config, 0, 3, False), alike(config, 3, 58, True))
    assert (config.mixer.key_dim, config.mixer.value_dim, config.rotary_dim, config.num_groups) == (192, 128, 64, 8)


def test_the_hub_file_of_kimi_k2_keeps_its_name():
    own = {
        "model_type": "kimi_k2", "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "n_group": 1,
        "max_position_embeddings": 131072, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1,
        "vocab_size": 163840,
        "rope_scaling": HUB_DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    }  # fmt: skip
    config = config_from_dict(HUB_DEEPSEEK_V3 | own)
    assert config == NAMED_CONFIGS["kimi-k2"] and isinstance(config, DeepseekV3Config)
    assert config_to_dict(config)["model_type"] == "kimi_k2"
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must be num_attention_heads=128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
        ({"head_dim": 128}, "head_dim=128 contradicts qk_nope_head_dim=128 and qk_rope_head_dim=64"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh' is not supported .only 'sigmoid' or 'softmax'"),
        ({"topk_method": "best"}, "topk_method='best' is not supported"),
        ({"n_group": 7}, "n_group=7 must divide n_routed_experts=256"),
        ({"n_group": 256}, "n_group=256 leaves 1 of n_routed_experts=256 a group"),
        ({"topk_group": 9}, "topk_group=9 must be at most n_group=8"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok=33 must be at most the 32 experts"),
        ({"n_shared_experts": -1}, "n_shared_experts=-1 must be 0 or more"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None must be a positive integer"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim=None must be a positive integer"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 must be a positive integer or null"),
        (
            {"mlp_bias": True, "sliding_window": 5},
            "mlp_bias=true is not supported .only false.; unknown field sliding_window=5",
        ),
        ({"model_type": "deepseek_v2"}, "norm_topk_prob=True is not supported"),
    ],
)
def test_bad_deepseek_fields_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**HUB_DEEPSEEK_V3, **change})


def test_nulls_of_deepseek_have_their_meaning():
    nulls = dict(n_shared_experts=None, n_group=None, topk_group=None, q_lora_rank=None, first_k_dense_replace=None)
    config = config_from_dict({**HUB_DEEPSEEK_V3, **nulls, "moe_layer_freq": 2, "num_hidden_layers": 5})
    assert (config.n_shared_experts, config.num_groups, config.q_lora_rank, config.moe_layers) == (0, 1, None, (0, 2, 4))


def test_the_hub_file_of_30b_is_the_named_config():
    config = config_from_dict(HUB_30B)
    assert config.rope_parameters == RopeParameters(rope_theta=1e6)
    assert config_to_dict(config) | {"sliding_window": 4096} == config_to_dict(NAMED_CONFIGS["qwen3-30b-a3b"])
    assert config.stages == (alike(config, 0, 48, True),)
    assert config.layer_windows == (None,) * 48


@pytest.mark.parametrize(
    "theirs",
    [
        transformers.Qwen3MoeConfig(num_experts=8, mlp_only_layers=[1], rope_theta=5e6, use_sliding_window=True),
        transformers.Qwen3MoeConfig(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        ),
        transformers.Qwen3Config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e7}),
        transformers.DeepseekV3Config(
            q_lora_rank=None,
            pad_token_id=7,
            rope_interleave=False,
            rope_parameters={"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.9}
            | {"original_max_position_embeddings": 4096, "rope_theta": 5e4},
        ),
        transformers.DeepseekV2Config(n_group=4, topk_group=2, topk_method="group_limited_greedy", num_experts_per_tok=6),
        transformers.Qwen3Config(num_hidden_layers=30, use_sliding_window=True, sliding_window=128, eos_token_id=[3, 4]),
    ],
    ids=["moe", "moe-yarn", "dense-dynamic", "deepseek-v3", "deepseek-v2", "dense-sliding"],
)
def test_configs_round_trip_with_transformers(theirs, tmp_path):
    """Our reader takes what transformers writes, and transformers reads every field back from our file."""
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
        (
            {"model_type": "llama"},
            "'llama' is not supported; supported are axk1, deepseek_v2, .*, qwen3, qwen3_moe, solar_open. "
            r".*moe_jax.MoE and .*docs/your_own_model.md.* CONTRIBUTING.md, \"A model\"",
        ),
        ({"n_group": 4, "new_field": 1}, "unknown field n_group=4; unknown field new_field=1"),
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
        ({"hidden_act": "gelu", "wild": 1}, "unknown field wild=1; .*hidden_act='gelu' is not supported"),
        ({"qkv_bias": True, "use_qk_norm": False}, "qkv_bias=true is not supported .only false.; use_qk_norm=false"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64 is not supported .only 0."),
        ({"num_experts": None}, "num_experts=None must be an integer"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list .in Python a tuple., each entry an integer"),
        ({"eos_token_id": "3"}, "eos_token_id='3' must be an integer or a list"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None must be a number"),
        ({"rope_theta": -1.0}, "rope field rope_theta=-1.0 must be positive"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope field factor=0 must be positive"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4' must be a number or null"),
        ({"rope_scaling": 5}, "rope_scaling=5 must be an object of fields or null"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters for each type of layer .full_attention",
        ),
    ],
)
def test_bad_and_unknown_fields_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**HUB_30B, **change})


@pytest.mark.parametrize(
    "harmless",
    [
        {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        {"unsloth_version": "2025.5.1", "unsloth_fixed": True, "_attn_implementation_autoset": True},
        {"id2label": {"0": "LABEL_0"}, "problem_type": None, "pruned_heads": {}, "is_encoder_decoder": False, "top_k": 50},
    ],
    ids=["coder", "unsloth", "transformers 4"],
)
def test_fields_without_effect_are_skipped(harmless):
    assert config_from_dict(HUB_30B | harmless) == config_from_dict(HUB_30B)


def test_an_ignored_rope_field_gives_a_warning(caplog):
    """transformers ignores `attn_factor`. So do we, with a warning."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_from_dict({**HUB_30B, "rope_scaling": {**yarn, "attn_factor": 0.878}})
    assert config == config_from_dict({**HUB_30B, "rope_scaling": yarn})
    assert "attn_factor=0.878 is ignored" in caplog.text


def test_a_null_yarn_factor_is_written_as_its_number():
    """Null means max_position_embeddings / original_max_position_embeddings, here 40960 / 10240."""
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 10240}
    config = config_from_dict({**HUB_30B, "rope_scaling": yarn})
    assert config_to_dict(config)["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize(
    "rope, known",
    [
        ({"rope_type": "default"}, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 40960),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 163840),
        ({"rope_type": "yarn", "original_max_position_embeddings": 10240}, 40960),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 40960),
    ],
)
def test_yarn_stretches_the_known_positions(rope, known):
    """Without an original length it stretches max_position_embeddings, as its frequencies do."""
    assert config_from_dict({**HUB_30B, "rope_scaling": rope}).known_positions == known


@pytest.mark.parametrize(
    "layers, expected",
    [
        ("aaaaaaa", [(0, 7, "a")]),
        ("rrrarrrarrra", [(0, 3, "rrra")]),
        ("rrrarrrarr", [(0, 2, "rrra"), (8, 2, "r")]),
        ("aarararar", [(0, 2, "a"), (2, 3, "ra"), (8, 1, "r")]),
        ("ra", [(0, 1, "r"), (1, 1, "a")]),
        ("aaAAA", [(0, 2, "a"), (2, 3, "A")]),
        ("aAaA", [(0, 1, "a"), (1, 1, "A"), (2, 1, "a"), (3, 1, "A")]),
    ],
)
def test_a_stage_repeats_the_pattern_that_covers_the_most_layers(layers, expected):
    """A letter is a mixer, an upper one of a layer with experts. Patterns never have both kinds of layers."""
    kinds = {letter: LayerKind(letter.lower(), letter.isupper()) for letter in layers}
    found = _stages(tuple(kinds[letter] for letter in layers))
    assert found == tuple(Stage(first, repeats, tuple(kinds[letter] for letter in body)) for first, repeats, body in expected)


def test_layers_of_one_kind_form_stages():
    config = Qwen3MoeConfig(num_hidden_layers=6, mlp_only_layers=(0, 1, 4))
    assert config.moe_layers == (2, 3, 5)
    assert config.stages == tuple(alike(config, *each) for each in ((0, 2, False), (2, 2, True), (4, 1, False), (5, 1, True)))
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
