"""Families of models, each as its defaults, its fields of config.json, its switches, and its names in checkpoints.

The defaults equal transformers', whose config classes also document the fields. `family.FamilyConfig` explains the tables.
Here are the families with softmax scores; `sigmoid_families` has the others.
"""

from dataclasses import dataclass, replace
from typing import Any

from moe_jax.config.base import ModelConfig, RopeParameters, rename, value_of
from moe_jax.config.family import NO_BIAS, W123, FamilyConfig, same_names, width_of
from moe_jax.config.sigmoid_families import SIGMOID_FAMILIES
from moe_jax.config.specs import ExpertsSpec, HeadsSpec, RouterRule

_EXPERTS = same_names("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef")


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(FamilyConfig):
    """Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671): a shared expert with a gate, biases of q, k and v."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 32768
    attention_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001
    shared_expert_intermediate_size: int = 5632
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    positive = (*FamilyConfig.positive, "shared_expert_intermediate_size", "decoder_sparse_step")
    fields = _EXPERTS | {"qkv_bias": "attention_bias"}
    supported = ModelConfig.supported | {"use_sliding_window": (False, None)}
    ignored = (*FamilyConfig.ignored, "sliding_window", "max_window_layers")  # read only with use_sliding_window
    attention = dict(head_norms=False, output_bias=False)
    hub_names = ModelConfig.hub_names | {"mlp.shared_experts": "mlp.shared_expert"}

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        spec = super().experts
        return spec and replace(spec, shared_intermediate_size=self.shared_expert_intermediate_size, shared_gate=True)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        layers = range(self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step)
        return tuple(layer for layer in layers if layer not in self.mlp_only_layers)

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads null `mlp_only_layers`, and the types of layers. None may slide."""
        if set(types := given.pop("layer_types", None) or ()) - {"full_attention"}:
            problems.append(f"layer_types={types!r} is not supported (only full_attention)")
        super().read_dialects(given, problems)
        if given.get("mlp_only_layers", 0) is None:
            given["mlp_only_layers"] = ()


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(FamilyConfig):
    """Mixtral (https://arxiv.org/abs/2401.04088)."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    moe_intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters(rope_theta=1e6)
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    router_aux_loss_coef: float = 0.001

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    fields = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"} | same_names(
        "num_experts_per_tok head_dim sliding_window router_aux_loss_coef"
    )
    supported = NO_BIAS | {"router_jitter_noise": (0.0, None)}
    attention = dict(head_norms=False)
    hub_names = {"mlp.router": "block_sparse_moe.gate"} | W123
    module_names = {"block_sparse_moe.": "mlp."}


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(FamilyConfig):
    """OLMoE (https://arxiv.org/abs/2409.02060): one norm for all heads' queries, one for all keys."""

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 50279
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01
    clip_qkv: float | None = None

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    fields = _EXPERTS | {"intermediate_size": "moe_intermediate_size"}
    attention = dict(joint_norms=True)

    @property
    def mixer(self) -> HeadsSpec:
        """The attention spec of each layer, with `clip_qkv`."""
        return replace(super().mixer, clip=self.clip_qkv)

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads an absent number of key heads as the number of heads."""
        given.setdefault("num_key_value_heads", None)
        super().read_dialects(given, problems)


@dataclass(frozen=True, kw_only=True)
class Ernie45MoeConfig(FamilyConfig):
    """ERNIE 4.5: softmax scores with a bias that affects only the choice; rotary pairs are neighbors.

    Layers from `moe_layer_start_index` to `moe_layer_end_index` (-1: the last one) have experts, if l + 1 is a multiple of
    `moe_layer_interval`. A token's weights are divided by their sum, or by `moe_norm_min` if that is larger.
    """

    vocab_size: int = 103424
    hidden_size: int = 2560
    intermediate_size: int = 12288
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters = RopeParameters(rope_theta=5e5)
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    num_experts: int = 64
    num_experts_per_tok: int = 6
    n_shared_experts: int = 2
    router_aux_loss_coef: float = 0.001
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12

    model_type = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    positive = (*FamilyConfig.positive, "moe_layer_interval")
    fields = {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    } | same_names("moe_intermediate_size router_aux_loss_coef head_dim")
    supported = NO_BIAS | {"use_bias": (False, None), "moe_gate": ("topk", None), "moe_use_aux_free": (True, None)}
    ignored = (*FamilyConfig.ignored, "moe_capacity", "num_nextn_predict_layers", "mtp_loss_scaling_factor")
    unread = ("mtp",)
    attention = dict(head_norms=False, interleaved=True)
    rule = RouterRule(choice_bias=True)
    hub_names = ModelConfig.hub_names | {"mlp.router.expert_bias": "mlp.moe_statics.e_score_correction_bias"}
    hub_rows = ("moe_statics.e_score_correction_bias",)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        spec = super().experts
        return spec and replace(spec, rule=replace(spec.rule, least_sum=self.moe_norm_min))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        layers = range(max(self.moe_layer_start_index, 0), min(last + 1, self.num_hidden_layers))
        return tuple(layer for layer in layers if (layer + 1) % self.moe_layer_interval == 0)


@dataclass(frozen=True, kw_only=True)
class HunyuanMoeConfig(FamilyConfig):
    """Hunyuan-A13B: heads are normed after rope; a shared expert as wide as a routed one; a fixed NTK factor `alpha`."""

    vocab_size: int = 290943
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    num_experts: int = 1
    num_experts_per_tok: int = 1
    n_shared_experts: int = 1

    model_type = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    fields = {"moe_topk": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"} | same_names(
        "num_experts head_dim"
    )
    supported = ModelConfig.supported | {
        "use_cla": (False, None),
        "num_shared_expert": (1, None),
        "use_mixed_mlp_moe": (True, None),
        "moe_layer_num_skipped": (0, None),
        "use_qk_norm": (True, None),
        "use_mla": (False, None),
        "mlp_bias": (False, None),
        "norm_type": ("rms", None),
        "use_rotary_pos_emb": (True, None),
    }
    ignored = (*FamilyConfig.ignored, *"cla_share_factor eod_token_id moe_drop_tokens moe_random_routing_dropped_token".split())
    attention = dict(norms_after_rope=True)
    per_layer = frozenset({"moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"})
    hub_names = ModelConfig.hub_names | {
        "mlp.router.weight": "mlp.gate.wg.weight",
        "mlp.shared_experts": "mlp.shared_mlp",
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
    }

    @classmethod
    def read_rope(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Computes the base of rotary frequencies with a fixed `alpha`, which files call "dynamic"."""
        for name in ("rope_scaling", "rope_parameters"):
            rope = given.get(name)
            if isinstance(rope, dict) and rope.get("alpha") and "dynamic" in (rope.get("type"), rope.get("rope_type")):
                alpha, width, given[name] = rope["alpha"], width_of(cls, given), None
                if alpha < 0 or width <= 2:
                    problems.append(f"rope field alpha={alpha} must be positive, for heads wider than 2; they have {width}")
                else:
                    theta = rope.get("rope_theta") or given.get("rope_theta") or 10000.0
                    given["rope_theta"] = theta * alpha ** (width / (width - 2))

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads lists with a value for each layer, whose entries must be equal, and other names of fields."""
        for name in sorted(cls.per_layer):
            if isinstance(values := given.get(name), list) and values:
                given[name] = values[0]
                if values.count(values[0]) < len(values) or len(values) < value_of(cls, given, "num_hidden_layers"):
                    problems.append(f"{name}={values!r} is not supported (only equal entries, one for each layer)")
        rename(given, "moe_intermediate_size", "intermediate_size", problems)
        rename(given, "attention_head_dim", "head_dim", problems)
        given.setdefault("num_key_value_heads", None)
        super().read_dialects(given, problems)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(FamilyConfig):
    """gpt-oss (https://arxiv.org/abs/2508.10925): sinks, windows in every second layer, biases, and a limited activation.

    Without `layer_types` the layers 0, 2, 4 and so on slide.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    moe_intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters(
        150000.0, "yarn", 32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False
    )
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    fields = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"} | same_names(
        "num_experts_per_tok head_dim sliding_window layer_types"
    )
    # Published files have the factor 0.9 of a balancing loss. transformers adds it only on request.
    ignored = (*FamilyConfig.ignored, "router_aux_loss_coef", "initial_context_length")
    attention = dict(head_norms=False, sinks=True)
    rule = RouterRule(linear_bias=True)
    hub_names = {}
    fused_experts = True

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        spec = super().experts
        return spec and replace(spec, biases=True, activation=(self.swiglu_alpha, self.swiglu_limit, 1.0))

    def _slides(self) -> list[bool]:
        """Returns for each layer whether it has the sliding window."""
        if self.layer_types is None:
            return [layer % 2 == 0 for layer in range(self.num_hidden_layers)]
        return super()._slides()

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads OpenAI's name of the number of chosen experts."""
        rename(given, "experts_per_token", "num_experts_per_tok", problems)
        super().read_dialects(given, problems)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Writes unscaled rotary embeddings by name: without `rope_scaling` they would be YaRN's."""
        super().write_dialect(values)
        values["rope_scaling"] = values["rope_scaling"] or {"rope_type": "default"}


FAMILIES: tuple[type[ModelConfig], ...] = (
    Qwen2MoeConfig, MixtralConfig, OlmoeConfig, Ernie45MoeConfig, HunyuanMoeConfig, GptOssConfig, *SIGMOID_FAMILIES
)  # fmt: skip
"""All families that are described by tables."""
