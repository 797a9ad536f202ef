"""Published configs of all families are read, counted and written; what a family does not compute is refused."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from moe_jax.config import NAMED_CONFIGS, RopeParameters, config_from_dict, config_to_dict
from moe_jax.config.families import FAMILIES
from moe_jax.config.hf_json import FILE_TYPES
from moe_jax.cost.flops import num_parameters

GLM4 = dict(
    model_type="glm4_moe", head_dim=128, hidden_act="silu", num_attention_heads=96, num_key_value_heads=8, n_group=1,
    topk_group=1, n_shared_experts=1, num_experts_per_tok=8, norm_topk_prob=True, attention_bias=True,
    partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=1000000, rope_scaling=None, vocab_size=151552,
    num_nextn_predict_layers=1, tie_word_embeddings=False, eos_token_id=[151329, 151336, 151338], pad_token_id=151329,
)  # fmt: skip
GLM4_FULL = dict(
    GLM4, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_routed_experts=160, num_hidden_layers=92,
    first_k_dense_replace=3, routed_scaling_factor=2.5, use_qk_norm=True,
)  # fmt: skip
M2 = dict(
    model_type="minimax_m2", hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48,
    num_key_value_heads=8, head_dim=128, num_local_experts=256, num_experts_per_tok=8, rotary_dim=64, rope_theta=5000000,
    rms_norm_eps=1e-6, vocab_size=200064, use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
    scoring_func="sigmoid", shared_intermediate_size=0, use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1,
    max_position_embeddings=196608,
)  # fmt: skip
IN_TURN = ["sliding_attention", "full_attention"]
GPT_OSS = dict(
    model_type="gpt_oss", attention_bias=True, experts_per_token=4, num_experts_per_tok=4, head_dim=64, hidden_act="silu",
    hidden_size=2880, initial_context_length=4096, intermediate_size=2880, max_position_embeddings=131072,
    num_attention_heads=64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150000, router_aux_loss_coef=0.9,
    rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
                      truncate=False),
    sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=201088,
    quantization_config=dict(quant_method="mxfp4"),
)  # fmt: skip

PUBLISHED = {
    "glm-4.5-air": dict(GLM4, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=128,
                        num_hidden_layers=46, first_k_dense_replace=1, routed_scaling_factor=1.0, use_qk_norm=False,
                        max_position_embeddings=131072),
    "glm-4.5": dict(GLM4_FULL, max_position_embeddings=131072),
    "glm-4.6": dict(GLM4_FULL, max_position_embeddings=202752),
    "glm-4.7-flash": dict(model_type="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, moe_intermediate_size=1536,
                          num_hidden_layers=47, num_attention_heads=20, num_key_value_heads=20, n_routed_experts=64,
                          n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=768,
                          qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, head_dim=64, routed_scaling_factor=1.8,
                          vocab_size=154880, max_position_embeddings=202752, num_nextn_predict_layers=1,
        rope_theta=1000000),
    "dots.llm1": dict(model_type="dots1", hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408,
                      num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=32, n_routed_experts=128,
                      n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, norm_topk_prob=True,
                      routed_scaling_factor=2.5, scoring_func="sigmoid", rope_theta=10000000, rms_norm_eps=1e-5,
                      vocab_size=152064, max_position_embeddings=32768, sliding_window=None),
    "solar-open-100b": dict(model_type="solar_open", hidden_size=4096, moe_intermediate_size=1280, num_hidden_layers=48,
                            num_attention_heads=64, num_key_value_heads=8, head_dim=128, n_routed_experts=128,
                            n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=0, routed_scaling_factor=1.0,
                            vocab_size=196608, max_position_embeddings=131072, rope_theta=1000000, rms_norm_eps=1e-5),
    "hy3": dict(model_type="hy_v3", hidden_size=4096, intermediate_size=13312, moe_intermediate_size=1536,
                expert_hidden_dim=1536, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
                num_experts=192, num_experts_per_tok=8, num_shared_experts=1, first_k_dense_replace=1, qk_norm=True,
                router_scaling_factor=2.826, vocab_size=120832, num_nextn_predict_layers=1, rms_norm_eps=1e-5,
                max_position_embeddings=262144, rope_parameters=dict(rope_type="default", rope_theta=11158840.0)),
    "a.x-k1": dict(model_type="axk1"),
    "minimax-m2": M2,
    "qwen1.5-moe-a2.7b": dict(model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
                              shared_expert_intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
                              num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, norm_topk_prob=False,
                              vocab_size=151936, max_position_embeddings=8192, rope_theta=1000000.0),
    "qwen2-57b-a14b": dict(model_type="qwen2_moe", hidden_size=3584, intermediate_size=18944, moe_intermediate_size=2560,
                           shared_expert_intermediate_size=20480, num_hidden_layers=28, num_attention_heads=28,
                           num_key_value_heads=4, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
                           vocab_size=151936, max_position_embeddings=131072, rope_theta=1000000.0),
    "mixtral-8x7b": dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
                         vocab_size=32000, rope_theta=1000000.0, rms_norm_eps=1e-5, sliding_window=None),
    "mixtral-8x22b": dict(model_type="mixtral", hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
                          num_attention_heads=48, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
                          vocab_size=32000, rope_theta=1000000.0, rms_norm_eps=1e-5, max_position_embeddings=65536),
    "olmoe-1b-7b": dict(model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16,
                        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
                        norm_topk_prob=False, clip_qkv=None, vocab_size=50304, rms_norm_eps=1e-5, rope_theta=10000.0),
    "ernie-4.5-21b-a3b": dict(model_type="ernie4_5_moe", hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536,
                              num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4, moe_num_experts=64, moe_k=6,
                              moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1,
                              vocab_size=103424, tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5),
    "ernie-4.5-300b-a47b": dict(model_type="ernie4_5_moe", hidden_size=8192, intermediate_size=28672,
                                moe_intermediate_size=3584, num_hidden_layers=54, num_attention_heads=64,
                                num_key_value_heads=8, moe_num_experts=64, moe_k=8, moe_num_shared_experts=0,
                                moe_layer_start_index=3, moe_layer_end_index=53, moe_layer_interval=1, vocab_size=103424,
                                tie_word_embeddings=False, rope_theta=500000.0, rms_norm_eps=1e-5),
    "gpt-oss-20b": dict(GPT_OSS, num_hidden_layers=24, num_local_experts=32, layer_types=IN_TURN * 12),
    "gpt-oss-120b": dict(GPT_OSS, num_hidden_layers=36, num_local_experts=128, layer_types=IN_TURN * 18),
    "hunyuan-a13b": dict(model_type="hunyuan_v1_moe", hidden_size=4096, intermediate_size=3072, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_experts=64, moe_topk=[8] * 32,
                         vocab_size=128167, tie_word_embeddings=True, rope_theta=10000.0, rms_norm_eps=1e-5,
                         rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0,
                                           mscale_all_dim=1.0)),
}  # fmt: skip
"""Fields of published files that change a result."""

COUNTS = {
    "glm-4.5-air": 106_852_245_504, "glm-4.5": 352_797_814_784, "glm-4.6": 352_797_814_784, "glm-4.7-flash": 29_943_390_976,
    "dots.llm1": 142_774_373_888, "solar-open-100b": 102_651_793_408, "hy3": 295_033_528_320, "a.x-k1": 518_983_052_288,
    "minimax-m2": 228_689_748_992, "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "olmoe-1b-7b": 6_919_161_856,
    "ernie-4.5-21b-a3b": 21_825_437_888 - 27 * 64, "ernie-4.5-300b-a47b": 299_484_163_264 - 51 * 64,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "hunyuan-a13b": 80_393_183_232,
}  # fmt: skip
"""Parameters of transformers' models with these configs: without MTP modules and biases of the choice.

transformers counts the biases of ERNIE's choice, which it does not train, as parameters.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_and_counted(name):
    """They equal our table, which has names of tokens too, and each family is in it."""
    config, named = config_from_dict(PUBLISHED[name]), NAMED_CONFIGS[name]
    of_tokens = {field: getattr(named, field) for field in ("pad_token_id", "bos_token_id", "eos_token_id")}
    assert replace(config, **of_tokens) == replace(named, max_position_embeddings=config.max_position_embeddings)
    assert num_parameters(config.without_mtp()) == COUNTS[name]


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_the_first_layers_of_a_config_keep_their_kinds(name):
    config = NAMED_CONFIGS[name]
    assert config.with_layers(4).layer_mixers == config.layer_mixers[:4]


def test_each_family_has_a_published_config():
    assert {fields["model_type"] for fields in PUBLISHED.values()} == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_again(name):
    assert config_from_dict(config_to_dict(NAMED_CONFIGS[name])) == NAMED_CONFIGS[name]


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("qwen2-57b-a14b", dict(use_sliding_window=True), "use_sliding_window=true is not supported"),
        ("qwen2-57b-a14b", dict(layer_types=["sliding_attention"]), "layer_types=.* is not supported"),
        ("mixtral-8x7b", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1 is not supported"),
        ("mixtral-8x7b", dict(attention_bias=True), "attention_bias=true is not supported"),
        ("mixtral-8x7b", dict(norm_topk_prob=False), "unknown field norm_topk_prob=False"),
        ("mixtral-8x7b", dict(num_experts_per_tok=9), "num_experts_per_tok=9 must be at most 8"),
        ("olmoe-1b-7b", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        ("glm-4.5", dict(scoring_func="softmax"), 'scoring_func="softmax" is not supported'),
        ("glm-4.5", dict(n_group=7), "n_group=7 must divide num_experts=160"),
        ("glm-4.5", dict(first_k_dense_replace=-1), "first_k_dense_replace=-1 must be 0 or more"),
        ("glm-4.7-flash", dict(first_k_dense_replace=2), "first_k_dense_replace=2 needs mlp_layer_types"),
        ("glm-4.7-flash", dict(mlp_layer_types=["sparse", "dense"]), "only dense layers, then sparse ones"),
        ("glm-4.7-flash", dict(scoring_func="softmax"), "scoring_func='softmax' is not supported"),
        ("dots.llm1", dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported"),
        ("dots.llm1", dict(layer_types=["chunked_attention"] * 62), "layer_types=.* is not supported"),
        ("dots.llm1", dict(layer_types=["full_attention"] * 61), "layer_types has 61 entries; num_hidden_layers=62"),
        ("glm-4.5", dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5 must be above 0 and at most 1"),
        ("minimax-m2", dict(rotary_dim=256), "partial_rotary_factor=2.0 must be above 0 and at most 1"),
        ("qwen2-57b-a14b", dict(attention_bias=False), "unknown field attention_bias=False"),
        ("minimax-m2", dict(shared_intermediate_size=64), "shared_intermediate_size=64 is not supported"),
        ("minimax-m2", dict(attn_type_list=[1, 0]), "attn_type_list=.* is not supported"),
        ("ernie-4.5-21b-a3b", dict(use_bias=True), "use_bias=true is not supported"),
        ("hunyuan-a13b", dict(moe_topk=[8, 4]), "moe_topk=.* is not supported"),
        ("hunyuan-a13b", dict(use_cla=True), "use_cla=true is not supported"),
        ("hy3", dict(mlp_bias=True), "mlp_bias=true is not supported"),
        ("solar-open-100b", dict(first_k_dense_replace=1), "first_k_dense_replace=1 is not supported"),
        ("a.x-k1", dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        ("gpt-oss-20b", dict(experts_per_token=2), "experts_per_token=2 contradicts num_experts_per_tok=4"),
        ("gpt-oss-20b", dict(swiglu_limit=0.0), "swiglu_limit=0.0 must be positive"),
        ("gpt-oss-20b", dict(layer_types=["full_attention"]), "layer_types has 1 entries; num_hidden_layers=24"),
        ("olmoe-1b-7b", dict(clip_qkv=-1.0), "clip_qkv=-1.0 must be positive or null"),
        ("ernie-4.5-21b-a3b", dict(moe_norm_min=-1.0), "moe_norm_min=-1.0 must be 0 or more"),
        ("mixtral-8x7b", dict(router_aux_loss_coef=-0.1), "router_aux_loss_coef=-0.1 must be 0 or more"),
        ("mixtral-8x7b", dict(sliding_window=0), "sliding_window=0 must be positive or null"),
        ("a.x-k1", dict(n_shared_experts=-1), "n_shared_experts=-1 must be 0 or more"),
        ("hunyuan-a13b", dict(moe_topk=[8] * 31), "moe_topk=.* is not supported .only equal entries, one for each layer"),
        ("glm-4.5", dict(first_k_dense_replace=93), "first_k_dense_replace=93 must be at most num_hidden_layers=92"),
        ("hunyuan-a13b", dict(head_dim=2), "rope field alpha=1000.0 must be positive, for heads wider than 2; they have 2"),
        (
            "hunyuan-a13b",
            dict(rope_scaling=dict(type="dynamic", alpha=-1.0)),
            "rope field alpha=-1.0 must be positive, for heads wider than 2; they have 128",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(PUBLISHED[name] | fields)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("qwen2-57b-a14b", dict(layer_types=3), r"layer_types=3 must be a list \(in Python a tuple\), each entry a string"),
        ("minimax-m2", dict(rotary_dim="64"), "rotary_dim='64' must be an integer"),
        ("minimax-m2", dict(attn_type_list=1), "attn_type_list=1 must be a list .*, each entry an integer"),
        ("minimax-m2", dict(num_attention_heads=0, head_dim=None), "num_attention_heads=0 must be a positive integer"),
        ("hunyuan-a13b", dict(rope_scaling=dict(type="dynamic", alpha="1000")), "rope field alpha='1000' must be a number"),
        ("hunyuan-a13b", dict(moe_topk=[[8]] * 32), "moe_topk=.* must be an integer or a list .*, each entry an integer"),
        ("glm-4.5", dict(partial_rotary_factor=[0.5]), r"partial_rotary_factor=\(0.5,\) must be a number"),
        ("glm-4.7-flash", dict(mlp_layer_types=5), "mlp_layer_types=5 must be a list .*, each entry a string"),
        ("glm-4.5", dict(hidden_size="8", n_group="1"), "n_group='1' must be .*; hidden_size='8' must be a positive"),
        ("glm-4.5", dict(model_type=["glm4_moe"]), r"model_type \['glm4_moe'\] is not supported"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(name, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(PUBLISHED[name] | fields)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_no_value_of_a_field_ends_in_another_error(family):
    """Each field in turn has a value of each kind of JSON."""
    fields = next(fields for fields in PUBLISHED.values() if fields["model_type"] == family.model_type)
    names = {*fields, *config_to_dict(config_from_dict(fields)), *FILE_TYPES, *family.supported}
    for name, value in product(sorted(names), (None, True, -1, 0, 1.5, "1", [], [1], ["a"], [[1]], {}, {"a": 1})):
        for changed in (fields | {name: value}, fields | {"head_dim": None, "rope_scaling": {"type": "dynamic", name: value}}):
            with suppress(ValueError):
                config_from_dict(changed)


@pytest.mark.parametrize(
    "name, fields, same",
    [
        ("glm-4.5", dict(routed_scaling_factor=None), dict(routed_scaling_factor=1.0)),
        ("minimax-m2", dict(head_dim=None, num_attention_heads=24), dict(head_dim=128, num_attention_heads=24)),
    ],
)
def test_null_is_the_neutral_value(name, fields, same):
    read, wanted = (config_from_dict(PUBLISHED[name] | given) for given in (fields, same))
    assert (read.mixer, read.experts) == (wanted.mixer, wanted.experts)


def test_defaults_of_gpt_oss_are_those_of_the_published_file():
    """Without layer_types every second layer slides, and without rope fields positions are scaled by YaRN."""
    left_out = "layer_types", "rope_scaling", "rope_theta", "attention_bias", "swiglu_limit"
    config = config_from_dict({name: value for name, value in PUBLISHED["gpt-oss-120b"].items() if name not in left_out})
    named = NAMED_CONFIGS["gpt-oss-120b"]
    assert config.layer_windows == named.layer_windows == (128, None) * 18
    assert config.rope_parameters == named.rope_parameters and config.experts == named.experts
    plain = replace(named, rope_parameters=RopeParameters(150000.0))
    assert config_from_dict(config_to_dict(plain)) == plain


def test_sparse_layers_from_below_the_first_are_all_layers():
    """transformers compares the number of a layer with the index."""
    config = config_from_dict(PUBLISHED["ernie-4.5-21b-a3b"] | dict(moe_layer_start_index=-3))
    assert config.moe_layers == tuple(range(28))


def test_fixed_alpha_without_sizes_reads_the_family_s_head():
    fields = {name: value for name, value in PUBLISHED["hunyuan-a13b"].items() if name not in ("head_dim", "hidden_size")}
    assert config_from_dict(fields).rope_parameters.rope_theta == pytest.approx(1e4 * 1000 ** (128 / 126))
