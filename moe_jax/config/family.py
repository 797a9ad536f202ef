"""The base of families with grouped-query attention that differ by switches: each is an entry in `config.families`."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from moe_jax.config.base import LayerKind, ModelConfig, Stage, is_positive, rename, value_of
from moe_jax.config.specs import ExpertsSpec, HeadsSpec, RouterRule


@dataclass(frozen=True, kw_only=True)
class FamilyConfig(ModelConfig):
    """A model whose layers differ from Qwen3-MoE's by the switches below. Its fields have one name for all families.

    A field outside `fields` keeps its default, and a config.json that names it is refused. `head_dim` None is
    hidden_size / num_attention_heads. The first `first_k_dense_replace` layers are dense. `n_shared_experts` are as wide as
    routed ones. `num_nextn_predict_layers` is the number of multi-token prediction (MTP) modules (`models.mtp`).
    """

    head_dim: int | None = None
    moe_intermediate_size: int = 1408
    num_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    num_nextn_predict_layers: int = 0

    positive = (*ModelConfig.positive, "moe_intermediate_size", "num_experts", "num_experts_per_tok", "n_group", "topk_group")
    fields: ClassVar[dict[str, str]] = {}
    """{name in the family's config.json: field of this class}, beyond the fields of `ModelConfig` and of the family's class."""
    ignored: ClassVar[tuple[str, ...]] = ("auto_map", "pretraining_tp")
    """Fields of hub files about remote code or training. They do not change what the model computes."""
    attention: ClassVar[dict[str, Any]] = {}
    """Switches of attention: fields of `HeadsSpec` that differ from its defaults."""
    rule: ClassVar[RouterRule] = RouterRule()
    """The router's rule; `norm_topk_prob`, the scaling factor and the groups are fields."""

    def problems(self) -> list[str]:
        """Returns one message per invalid field or combination of fields; empty if the config is valid."""
        problems = super().problems()
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not is_positive(self.width):
            problems.append(f"head_dim={self.head_dim} must be a positive integer, or null for hidden_size / heads")
        if self.mixer.rotary_dim % 2:
            problems.append(f"a head rotates {self.mixer.rotary_dim} numbers, which must be even: rotary embeddings turn pairs")
        if not 0 < self.partial_rotary_factor <= 1:
            problems.append(f"partial_rotary_factor={self.partial_rotary_factor} must be above 0 and at most 1")
        for name in ("sliding_window", "clip_qkv", "swiglu_alpha", "swiglu_limit"):
            if (value := getattr(self, name, None)) is not None and not value > 0:
                problems.append(f"{name}={value} must be positive or null")
        kinds = self.layer_types
        if kinds is not None and set(kinds) - {"full_attention", "sliding_attention"}:
            problems.append(f"layer_types={kinds!r} is not supported (only full_attention and sliding_attention)")
        elif kinds is not None and len(kinds) != self.num_hidden_layers:
            problems.append(f"layer_types has {len(kinds)} entries; num_hidden_layers={self.num_hidden_layers}")
        if (dense := self.first_k_dense_replace) > self.num_hidden_layers:
            problems.append(f"first_k_dense_replace={dense} must be at most num_hidden_layers={self.num_hidden_layers}")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            problems.append(
                f"n_group={self.n_group} must divide num_experts={self.num_experts}, and be at least "
                f"topk_group={self.topk_group}"
            )
        elif self.num_experts_per_tok > (most := self.topk_group * self.num_experts // self.n_group):
            problems.append(f"num_experts_per_tok={self.num_experts_per_tok} must be at most {most}")
        return problems

    @property
    def width(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def mixer(self) -> HeadsSpec:
        """The attention spec of each layer (GQA)."""
        switches = dict(head_norms=True, biases=self.attention_bias, rotary_dim=int(self.width * self.partial_rotary_factor))
        heads = dict(
            heads=self.num_attention_heads, kv_heads=self.num_key_value_heads, key_dim=self.width, value_dim=self.width
        )
        return HeadsSpec(**heads | switches | self.attention)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of each sparse layer; None if no layer is sparse."""
        if not self.routed_layers:
            return None
        return ExpertsSpec(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.n_shared_experts * self.moe_intermediate_size,
            rule=replace(
                self.rule,
                norm_topk_prob=self.norm_topk_prob,
                routed_scaling_factor=self.routed_scaling_factor,
                num_groups=self.n_group,
                groups_per_token=self.topk_group,
            ),
            aux_loss_coef=self.router_aux_loss_coef,
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens (a token attends to itself and window - 1 before it); None: no limit."""
        return tuple(self.sliding_window if slides else None for slides in self._slides())

    def _slides(self) -> list[bool]:
        """Returns for each layer whether it has the sliding window: by `layer_types`, or all layers."""
        if self.layer_types is None:
            return [True] * self.num_hidden_layers
        return [kind == "sliding_attention" for kind in self.layer_types]

    @property
    def mtp_stages(self) -> tuple[Stage, ...]:
        """The MTP modules as stages of one sparse layer each, after the last layer (`models.mtp`)."""
        modules = range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)
        return tuple(Stage(layer, 1, (LayerKind(self.mixer, True),)) for layer in modules)

    def without_mtp(self) -> Self:
        """Returns this config without MTP modules."""
        return replace(self, num_nextn_predict_layers=0)

    @classmethod
    def read_dialects(cls, given: dict[str, Any], problems: list[str]) -> None:
        """Renames the family's fields of config.json to this class's; refuses fields of other families."""
        super().read_dialects(given, problems)
        for name in cls.ignored:
            given.pop(name, None)
        for other, field in (("num_local_experts", "num_experts"), ("num_mtp_layers", "num_nextn_predict_layers")):
            for name in [name for name, of in cls.fields.items() if of == field]:
                rename(given, other, name, problems)
        for name in sorted((_SWITCHES | set(cls.fields.values())) - cls.fields.keys()):
            if name in given:
                problems.append(f"unknown field {name}={given.pop(name)!r}")
        read = {cls.fields[name]: given.get(name) for name in cls.fields.keys() & given.keys()}
        for name in cls.fields.keys() - ModelConfig.__dataclass_fields__.keys():
            given.pop(name, None)
        # Files may have null in a field that they do not need: it means the neutral value.
        nulls: dict[str, Any] = {"head_dim": None, "sliding_window": None, "layer_types": None, "norm_topk_prob": False}
        nulls |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        given |= {name: nulls.get(name, 0) if value is None else value for name, value in read.items()}

    def write_dialect(self, values: dict[str, Any]) -> None:
        """Renames fields to the family's names in config.json, and removes those that it does not have."""
        written = {name: getattr(self, field) for name, field in self.fields.items()}
        for name in _SWITCHES | {"attention_bias"} & (self.supported.keys() | set(self.fields.values())):
            del values[name]
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}
        values |= {name: value for name, value in written.items() if name not in _OPTIONAL or value is not None}


NO_BIAS: dict[str, tuple] = ModelConfig.supported | {"attention_bias": (False, None)}
"""`supported` of families without biases of attention."""
W123 = {"mlp.experts": "block_sparse_moe.experts", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of experts, for `hub_names`."""

_OPTIONAL = ("head_dim", "layer_types")
"""Fields that config.json lacks if they are None."""
_SWITCHES = {field.name for field in dataclasses.fields(FamilyConfig)} - {
    field.name for field in dataclasses.fields(ModelConfig)
}
"""The fields that only some families have."""


def width_of(cls: type[FamilyConfig], given: dict[str, Any]) -> int:
    """Returns the width of a head in a config.json; 1 in place of 0, which the config's own checks report."""
    head, hidden, heads = (value_of(cls, given, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    return head or max(hidden // heads, 1)


def same_names(names: str) -> dict[str, str]:
    """Returns `fields` for names in config.json that equal the fields' names."""
    return {name: name for name in names.split()}
