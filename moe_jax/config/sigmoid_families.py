"""Families whose routers have sigmoid scores and choice biases, as in DeepSeek-V3; tables as in `config.families`."""

from dataclasses import dataclass, replace
from typing import Any

from moe_jax.config.base import ModelConfig, RopeParameters, rename, value_of
from moe_jax.config.deepseek_v3 import DeepseekV3Config
from moe_jax.config.family import NO_BIAS, W123, FamilyConfig, same_names, width_of
from moe_jax.config.specs import TINY, ExpertsSpec, HeadsSpec, RouterRule

_DEEPSEEK = {"n_routed_experts": "num_experts"} | same_names(
    "head_dim num_experts_per_tok moe_intermediate_size norm_topk_prob n_shared_experts routed_scaling_factor n_group "
    "topk_group first_k_dense_replace num_nextn_predict_layers"
)
_SIGMOID = RouterRule("sigmoid", added_to_sum=TINY, choice_bias=True)
_ROUTED_AS_DEEPSEEK: dict[str, tuple] = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(FamilyConfig):
    """GLM-4.5, 4.6 and 4.7 (https://arxiv.org/abs/2508.06471): DeepSeek's router; half of each head is rotated."""

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_experts: int = 128
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    n_shared_experts: int = 1
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    fields = _DEEPSEEK | same_names("partial_rotary_factor")
    supported = ModelConfig.supported | _ROUTED_AS_DEEPSEEK
    attention = dict(output_bias=False)
    rule = _SIGMOID

    @property
    def mixer(self) -> HeadsSpec:
        """The attention spec of each layer, with `use_qk_norm`."""
        return replace(super().mixer, head_norms=self.use_qk_norm)


@dataclass(frozen=True, kw_only=True)
class Dots1Config(FamilyConfig):
    """dots.llm1 (https://arxiv.org/abs/2506.05767): DeepSeek's router. Layers slide from `max_window_layers` on."""

    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    num_hidden_layers: int = 62
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 2048
    num_experts: int = 128
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 62

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    fields = _DEEPSEEK | same_names("sliding_window layer_types")
    supported = ModelConfig.supported | _ROUTED_AS_DEEPSEEK | {"moe_layer_freq": (1, None)}
    rule = _SIGMOID

    def _slides(self) -> list[bool]:
        """Returns for each layer whether it has the sliding window: by `layer_types`, or from `max_window_layers` on."""
        if self.layer_types is None:
            return [layer >= self.max_window_layers for layer in range(self.num_hidden_layers)]
        return super()._slides()


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(FamilyConfig):
    """MiniMax-M2: sigmoid scores, one norm for all heads, half of each head is rotated, no shared expert."""

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 196608
    rope_parameters: RopeParameters = RopeParameters(rope_theta=5e6)
    bos_token_id: int | None = 200034
    eos_token_id: int | tuple[int, ...] | None = 200020
    num_experts: int = 256
    num_experts_per_tok: int = 8
    router_aux_loss_coef: float = 0.001

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    fields = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"} | same_names(
        "num_experts_per_tok head_dim router_aux_loss_coef partial_rotary_factor"
    )
    supported = NO_BIAS | {
        "router_jitter_noise": (0.0, None),
        "qk_norm_type": ("per_layer", None),
        "use_qk_norm": (True, None),
        "use_routing_bias": (True, None),
        "scoring_func": ("sigmoid", None),
        "shared_intermediate_size": (0, None),
    }
    ignored = (*FamilyConfig.ignored, "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    unread = ("mtp", ".layers.{behind}.")
    attention = dict(joint_norms=True)
    rule = replace(_SIGMOID, added_to_sum=0.0)
    hub_names = {
        "mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.router": "block_sparse_moe.gate",
    } | W123
    module_names = {"block_sparse_moe.": "mlp."}

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads the number of rotated numbers as a part of a head."""
        if (rotary := given.pop("rotary_dim", None)) is not None:
            width = width_of(cls, given)
            given.setdefault("partial_rotary_factor", rotary / width)
            if given["partial_rotary_factor"] * width != rotary:
                problems.append(f"rotary_dim={rotary} contradicts partial_rotary_factor={given['partial_rotary_factor']}")
        if set(types := given.pop("attn_type_list", None) or ()) - {1}:
            problems.append(f"attn_type_list={types!r} is not supported (only 1)")
        super().read_dialects(given, problems)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Writes the number of rotated numbers, as the hub's files do."""
        super().write_dialect(values)
        values.pop("partial_rotary_factor", None)
        values["rotary_dim"] = self.mixer.rotary_dim


@dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(FamilyConfig):
    """Solar-Open: DeepSeek's router, every layer sparse, no norms of heads."""

    vocab_size: int = 196608
    hidden_size: int = 4096
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1280
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters(rope_theta=1e6)
    num_experts: int = 128
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1

    model_type = "solar_open"
    architecture = "SolarOpenForCausalLM"
    fields = {name: field for name, field in _DEEPSEEK.items() if "first_k" not in name} | same_names("partial_rotary_factor")
    supported = ModelConfig.supported | _ROUTED_AS_DEEPSEEK | {"first_k_dense_replace": (0, None)}
    attention = dict(head_norms=False, output_bias=False)
    rule = _SIGMOID


@dataclass(frozen=True, kw_only=True)
class HYV3Config(FamilyConfig):
    """Hy3: DeepSeek's router, norms of heads. transformers reads only `mlp_layer_types`."""

    vocab_size: int = 120832
    hidden_size: int = 4096
    intermediate_size: int = 13312
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    initializer_range: float = 0.006
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters(rope_theta=11158840.0)
    num_experts: int = 192
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.826

    model_type = "hy_v3"
    architecture = "HYV3ForCausalLM"
    fields = {"num_shared_experts": "n_shared_experts", "router_scaling_factor": "routed_scaling_factor"} | same_names(
        "num_experts num_experts_per_tok moe_intermediate_size head_dim first_k_dense_replace"
    )
    supported = ModelConfig.supported | dict.fromkeys(
        ("route_norm", "qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"), (True, None)
    )
    # Both affect only the rounding of a sum, and transformers ignores the second.
    ignored = (*FamilyConfig.ignored, "enable_moe_fp32_combine", "enable_lm_head_fp32", "num_nextn_predict_layers")
    unread = (".layers.{behind}.",)
    rule = _SIGMOID
    hub_names = {
        "mlp.router.weight": "mlp.router.gate.weight",
        "mlp.router.expert_bias": "mlp.expert_bias",
        "mlp.shared_experts": "mlp.shared_mlp",
    }
    module_names = {"mlp.router.gate.": "mlp.gate.", "mlp.shared_mlp.": "mlp.shared_experts."}

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads the types of layers, and another name of the experts' width."""
        rename(given, "expert_hidden_dim", "moe_intermediate_size", problems)
        if given.pop("mlp_bias", None):
            problems.append("mlp_bias=true is not supported (only false)")
        _read_dense_layers(cls, given, problems)
        super().read_dialects(given, problems)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Writes the types of layers, which alone transformers reads."""
        super().write_dialect(values)
        values["mlp_layer_types"] = _dense_layer_types(self.first_k_dense_replace, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """GLM-4.7-Flash: DeepSeek-V3 with other sizes. transformers reads only `mlp_layer_types`."""

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_key_value_heads: int = 20
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.8
    aux_loss_alpha: float = 0.0
    num_nextn_predict_layers: int = 0

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        wrong = [name for name in _ROUTED_AS_DEEPSEEK if getattr(self, name) not in _ROUTED_AS_DEEPSEEK[name]]
        return super().problems() + [f"{name}={getattr(self, name)!r} is not supported" for name in wrong]

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads the types of layers."""
        _read_dense_layers(cls, given, problems)
        super().read_dialects(given, problems)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Writes the types of layers, which alone transformers reads."""
        values["mlp_layer_types"] = _dense_layer_types(self.first_k_dense_replace, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class AXK1Config(Glm4MoeLiteConfig):
    """A.X-K1: DeepSeek-V3 with a norm after the experts. Its files have no choice biases."""

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 64
    num_key_value_heads: int = 64
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    n_routed_experts: int = 192
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    bos_token_id: int | None = 163691
    eos_token_id: int | tuple[int, ...] | None = 163691

    model_type = "axk1"
    architecture = "AXK1ForCausalLM"
    hub_names = ModelConfig.hub_names | {"mlp.output_norm": "post_mlp_layernorm"}
    unread = ("post_mlp_layernorm",)  # dense layers have one that no model reads
    optional = ("e_score_correction_bias",)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        spec = super().experts
        return spec and replace(spec, output_norm=True)


def _read_dense_layers(cls: type[ModelConfig], given: dict[str, Any], problems: list[str]) -> None:
    """Replaces `mlp_layer_types` ("dense" or "sparse" for each layer) by `first_k_dense_replace`."""
    kinds, count = given.pop("mlp_layer_types", None), given.get("first_k_dense_replace")
    if kinds is None:
        if count not in (None, 1):
            problems.append(
                f"first_k_dense_replace={count} needs mlp_layer_types: without these, transformers has 1 dense layer"
            )
        return
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if list(kinds) != _dense_layer_types(dense, len(kinds)):
        problems.append(f"mlp_layer_types={kinds!r} is not supported (only dense layers, then sparse ones)")
    elif count not in (None, dense) or len(kinds) != value_of(cls, given, "num_hidden_layers"):
        problems.append(f"mlp_layer_types={kinds!r} contradicts first_k_dense_replace={count} or num_hidden_layers")
    given["first_k_dense_replace"] = dense


def _dense_layer_types(dense: int, layers: int) -> list[str]:
    """Returns `mlp_layer_types` of a model whose first `dense` layers are dense."""
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


SIGMOID_FAMILIES: tuple[type[ModelConfig], ...] = (
    Glm4MoeConfig, Glm4MoeLiteConfig, Dots1Config, MiniMaxM2Config, SolarOpenConfig, HYV3Config, AXK1Config
)  # fmt: skip
"""All families of this file."""
