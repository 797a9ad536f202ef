"""Configurations of DeepSeek-V3 (and R1) and DeepSeek-V2, which differ in how the router scores and chooses experts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from moe_jax.config.base import LayerKind, ModelConfig, Stage, is_positive, rename, value_of
from moe_jax.config.specs import TINY, ExpertsSpec, LatentSpec, RouterRule

SCORING_FUNCTIONS = ("sigmoid", "softmax")
TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(ModelConfig):
    """DeepSeek-V3 (https://arxiv.org/abs/2412.19437), with the field names and defaults of transformers and the hub.

    Layer l has experts if l >= `first_k_dense_replace` and l is a multiple of `moe_layer_freq`. With `q_lora_rank` None, one
    matrix computes the queries. `topk_method` selects the choice of experts:

        noaux_tc               by score + bias of the expert, in the `topk_group` groups with the largest sum of their two best
        group_limited_greedy   by score, in the `topk_group` groups with the best expert
        greedy                 by score, among all experts

    `aux_loss_alpha` is the factor of the balance loss in training; with `seq_aux` that loss is computed within each sequence.
    `num_nextn_predict_layers` is the number of multi-token prediction (MTP) modules after the last layer (`models.mtp`).
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    max_position_embeddings: int = 4096
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True
    num_nextn_predict_layers: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    positive = (
        *ModelConfig.positive,
        *("moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_routed_experts", "num_experts_per_tok", "moe_layer_freq", "n_group", "topk_group"),
    )
    supported: ClassVar[dict[str, tuple]] = ModelConfig.supported | {"mlp_bias": (False, None)}
    ignored: ClassVar[tuple[str, ...]] = ("auto_map", "ep_size", "pretraining_tp")
    """Fields of hub files about remote code or training. They do not change what the model computes."""

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = super().problems()
        if self.num_key_value_heads != self.num_attention_heads:
            problems.append(
                f"num_key_value_heads={self.num_key_value_heads} must be num_attention_heads={self.num_attention_heads}: "
                "every head has keys of its own"
            )
        if self.qk_rope_head_dim % 2:
            problems.append(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rotary embeddings turn pairs")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            problems.append(f"q_lora_rank={self.q_lora_rank} must be a positive integer or null")
        if self.scoring_func not in SCORING_FUNCTIONS:
            problems.append(f"scoring_func={self.scoring_func!r} is not supported (only {_names(SCORING_FUNCTIONS)})")
        if self.topk_method not in TOPK_METHODS:
            problems.append(f"topk_method={self.topk_method!r} is not supported (only {_names(TOPK_METHODS)})")
        return problems + self._problems_of_groups()

    def _problems_of_groups(self) -> list[str]:
        experts, k = self.n_routed_experts, self.num_experts_per_tok
        if self.num_groups == 1:
            return [] if k <= experts else [f"num_experts_per_tok={k} must be at most n_routed_experts={experts}"]
        if experts % self.n_group:
            return [f"n_group={self.n_group} must divide n_routed_experts={experts}"]
        group_size = experts // self.n_group
        if self.topk_group > self.n_group:
            return [f"topk_group={self.topk_group} must be at most n_group={self.n_group}"]
        if group_size < 2 and self.topk_method == "noaux_tc":
            return [f"n_group={self.n_group} leaves 1 of n_routed_experts={experts} a group, whose score is its two best"]
        if k > self.topk_group * group_size:
            return [f"num_experts_per_tok={k} must be at most the {self.topk_group * group_size} experts of topk_group groups"]
        return []

    @property
    def mixer(self) -> LatentSpec:
        """The attention spec of each layer (MLA). Part of each head is rotated, the rest has no positions."""
        return LatentSpec(
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            key_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            biases=self.attention_bias,
            head_norms=False,
            rank=self.kv_lora_rank,
            query_rank=self.q_lora_rank or 0,
        )

    @property
    def num_groups(self) -> int:
        """Number of groups of experts; 1 if the router chooses among all experts."""
        return 1 if self.topk_method == "greedy" else self.n_group

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        if not self.routed_layers:
            return None
        return ExpertsSpec(
            num_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.n_shared_experts * self.moe_intermediate_size,
            rule=RouterRule(
                scoring_func=self.scoring_func,
                num_groups=self.num_groups,
                groups_per_token=self.topk_group,
                group_score_size=2 if self.topk_method == "noaux_tc" else 1,
                norm_topk_prob=self.norm_topk_prob,
                routed_scaling_factor=self.routed_scaling_factor,
                added_to_sum=TINY,
                choice_bias=self.topk_method == "noaux_tc",
            ),
            sequence_loss_coef=self.aux_loss_alpha if self.seq_aux else 0.0,
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self._is_sparse(layer))

    @property
    def mtp_stages(self) -> tuple[Stage, ...]:
        """The MTP modules as stages of one layer each, after the last layer (`models.mtp`)."""
        last = self.num_hidden_layers + self.num_nextn_predict_layers
        kinds = {layer: LayerKind(self.mixer, self._is_sparse(layer)) for layer in range(self.num_hidden_layers, last)}
        return tuple(Stage(layer, 1, (kind,)) for layer, kind in kinds.items())

    def without_mtp(self) -> Self:
        """Returns this config without MTP modules."""
        return replace(self, num_nextn_predict_layers=0)

    def _is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads transformers 5's names, removes fields that follow from others, and replaces nulls by their meaning."""
        super().read_dialects(given, problems)
        for name in cls.ignored:
            given.pop(name, None)
        rename(given, "num_local_experts", "n_routed_experts", problems)
        rename(given, "num_mtp_layers", "num_nextn_predict_layers", problems)
        nope, rope = (value_of(cls, given, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        sizes = is_positive(nope) and is_positive(rope)  # if not, the config's own checks report it
        for name, right in (("head_dim", rope), ("qk_head_dim", nope + rope if sizes else None)):
            if (value := given.pop(name, None)) not in (None, right) and sizes:
                problems.append(f"{name}={value} contradicts qk_nope_head_dim={nope} and qk_rope_head_dim={rope}")
        absent = dict(n_shared_experts=0, first_k_dense_replace=0, num_nextn_predict_layers=0, n_group=1, topk_group=1)
        for name, value in (absent | dict(norm_topk_prob=False, rope_interleave=False)).items():
            if given.get(name, value) is None:
                given[name] = value


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekV3Config):
    """DeepSeek-V2 (https://arxiv.org/abs/2405.04434): softmax scores, and no bias in the choice of experts.

    Names and defaults are from transformers' DeepseekV2Config. `norm_topk_prob` must be false, as in all published models:
    implementations disagree about its effect.
    """

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 2048
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    first_k_dense_replace: int = 0
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = super().problems()
        if self.norm_topk_prob:
            problems.append("norm_topk_prob=True is not supported (only false)")
        if not self.rope_interleave:
            problems.append("rope_interleave=False is not supported (only true)")
        return problems


@dataclass(frozen=True)
class KimiK2Config(DeepseekV3Config):
    """Hyperparameters of Kimi K2: DeepSeek-V3's architecture under another name (https://arxiv.org/abs/2507.20534)."""

    model_type = "kimi_k2"


def _names(choices: tuple[str, ...]) -> str:
    return " or ".join(map(repr, choices))
