"""Configurations of Qwen3 and Qwen3-MoE."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moe_jax.config.base import ModelConfig, is_positive, rename, value_of
from moe_jax.config.specs import ExpertsSpec, HeadsSpec, RouterRule


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """Dense Qwen3, with the field names and defaults of transformers' Qwen3Config, which documents each field."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    positive = (*ModelConfig.positive, "head_dim")
    # Qwen3-Coder's files have these three fields; transformers reads none of them.
    supported: ClassVar[dict[str, tuple]] = ModelConfig.supported | {
        "qkv_bias": (False, None),
        "use_qk_norm": (True, None),
        "shared_expert_intermediate_size": (0, None),
    }

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = super().problems()
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.layer_types is not None:
            unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
            if unknown or len(self.layer_types) != self.num_hidden_layers:
                problems.append(
                    f"layer_types must name full_attention or sliding_attention for each of {self.num_hidden_layers} layers; "
                    f"it has {len(self.layer_types)} entries" + (f" and {', '.join(unknown)}" if unknown else "")
                )
        if any(window is not None and window <= 0 for window in self.layer_windows):
            problems.append(f"sliding_window={self.sliding_window} must be positive")
        return problems

    @property
    def mixer(self) -> HeadsSpec:
        """The attention spec of each layer (GQA). Whole heads are rotated."""
        return HeadsSpec(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            rotary_dim=self.head_dim,
            biases=self.attention_bias,
            head_norms=True,
        )

    @property
    def experts(self) -> ExpertsSpec | None:
        """None: every layer is dense."""
        return None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens (a token attends to itself and window - 1 before it); None: no limit."""
        layers = range(self.num_hidden_layers)
        if self.layer_types is not None:
            sliding = [kind == "sliding_attention" for kind in self.layer_types]
        else:
            sliding = [layer >= self.max_window_layers for layer in layers]
        return tuple(self.sliding_window if slides and self.use_sliding_window else None for slides in sliding)

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Computes the head size from hidden_size and the number of heads if config.json leaves it null."""
        super().read_dialects(given, problems)
        if given.get("head_dim", 0) is None:
            given["head_dim"] = _even_share(cls, given)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Removes layer types that follow from the other fields."""
        if values["layer_types"] is None:
            del values["layer_types"]


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen3-MoE, with the field names and defaults of transformers' Qwen3MoeConfig.

    Layer l has experts if l is not in `mlp_only_layers` and (l + 1) is a multiple of `decoder_sparse_step`.
    With `use_sliding_window` every layer slides: this architecture has no `layer_types` and no `max_window_layers`.
    """

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_window_layers: int = 0
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    positive = (*Qwen3Config.positive, "moe_intermediate_size", "decoder_sparse_step")

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = super().problems()
        if self.moe_layers and not 1 <= self.num_experts_per_tok <= self.num_experts:
            problems.append(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and num_experts={self.num_experts}"
            )
        return problems

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        if not self.routed_layers:
            return None
        return ExpertsSpec(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            rule=RouterRule(norm_topk_prob=self.norm_topk_prob),
            aux_loss_coef=self.router_aux_loss_coef,
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Reads transformers 5's `num_local_experts`, and derives the head size if it is absent."""
        super().read_dialects(given, problems)
        rename(given, "num_local_experts", "num_experts", problems)
        # Hub files of this architecture have these two; no implementation reads them.
        given.pop("max_window_layers", None)
        given.pop("layer_types", None)
        if given.get("mlp_only_layers", 0) is None:
            given["mlp_only_layers"] = ()
        if "head_dim" not in given:
            given["head_dim"] = _even_share(cls, given)

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Removes fields that this architecture does not have."""
        super().write_dialect(values)
        del values["max_window_layers"]
        values.pop("layer_types", None)


def _even_share(cls: type[Qwen3Config], given: dict[str, Any]) -> int:
    """Returns hidden_size / num_attention_heads; the default if they are invalid, which the config's own checks report."""
    hidden, heads = (value_of(cls, given, name) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if is_positive(hidden) and is_positive(heads) else cls.head_dim
