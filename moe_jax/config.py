"""Model configurations with Hugging Face's field names, read from and written to config.json.

Reading is a checked contract: every field of a config.json is handled, or stands in `IGNORED_FIELDS` because it cannot
change what the model computes, or is refused by name. Both dialects are read: the hub's (`num_experts`, `rope_theta`,
`rope_scaling`) and transformers 5's (`num_local_experts`, `rope_parameters`).
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IGNORED_FIELDS = frozenset(
    "architectures transformers_version torch_dtype dtype use_cache _name_or_path output_router_logits "
    "output_attentions output_hidden_states return_dict _attn_implementation _experts_implementation".split()
)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """How rotary frequencies are made; the fields of transformers' `rope_parameters` (hub: `rope_theta` and `rope_scaling`).

    `factor` is used by linear, dynamic and yarn; all below it by yarn alone.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Stage:
    """A run of neighbouring layers of one kind, stored stacked and run by one `lax.scan`."""

    first_layer: int
    num_layers: int
    sparse: bool


@dataclass(frozen=True)
class Qwen3Config:
    """Dense Qwen3. Field names and defaults are those of transformers' Qwen3Config; see its documentation for each."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    attention_bias: bool = False
    attention_dropout: float = 0.0
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def __post_init__(self):
        problems = _invalid_values(self)
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return ()

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens (a token sees itself and window - 1 before it); None: all."""
        layers = range(self.num_hidden_layers)
        if self.layer_types is not None:
            sliding = [kind == "sliding_attention" for kind in self.layer_types]
        else:
            sliding = [layer >= self.max_window_layers for layer in layers]
        return tuple(self.sliding_window if slides and self.use_sliding_window else None for slides in sliding)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers as runs of one kind, in order."""
        sparse_layers = frozenset(self.moe_layers)
        stages: list[Stage] = []
        for layer in range(self.num_hidden_layers):
            sparse = layer in sparse_layers
            if stages and stages[-1].sparse == sparse:
                stages[-1] = dataclasses.replace(stages[-1], num_layers=stages[-1].num_layers + 1)
            else:
                stages.append(Stage(layer, 1, sparse))
        return tuple(stages)


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen3-MoE. Field names and defaults are those of transformers' Qwen3MoeConfig.

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

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a mixture of experts."""
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )


CONFIG_CLASSES: dict[str, type[Qwen3Config]] = {c.model_type: c for c in (Qwen3Config, Qwen3MoeConfig)}


def load_config(folder: str | Path) -> Qwen3Config:
    """Reads `folder`/config.json. Raises FileNotFoundError, or ValueError that lists every field that is not understood."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}: a Hugging Face checkpoint folder has one")
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object of fields")
    return config_from_dict(values)


def config_from_dict(values: dict[str, Any]) -> Qwen3Config:
    """The config that a config.json's fields describe, in the hub's dialect or in transformers 5's.

    Raises:
      ValueError: model_type is unknown, or fields are unknown or have values that are not supported; one error lists all.
    """
    model_type = values.get("model_type")
    if model_type not in CONFIG_CLASSES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(CONFIG_CLASSES))}")
    cls = CONFIG_CLASSES[model_type]
    given = {k: v for k, v in values.items() if k not in IGNORED_FIELDS and k != "model_type"}
    problems: list[str] = []
    rope = _read_rope(given, problems)
    if "num_local_experts" in given:
        experts = given.pop("num_local_experts")
        if given.setdefault("num_experts", experts) != experts:
            problems.append(f"num_local_experts={experts} contradicts num_experts={given['num_experts']}")
    known = {f.name for f in dataclasses.fields(cls)}
    if model_type == "qwen3_moe":
        # Written by hub files of this architecture, read by none of its implementations.
        given.pop("max_window_layers", None)
        given.pop("layer_types", None)
    for name in sorted(set(given) - known):
        problems.append(f"unknown field {name}={given.pop(name)!r}")
    if given.get("num_key_value_heads", 0) is None:
        given["num_key_value_heads"] = given.get("num_attention_heads", cls.num_attention_heads)
    if given.get("mlp_only_layers", 0) is None:
        given["mlp_only_layers"] = ()
    if given.get("head_dim", 0) is None or (model_type == "qwen3_moe" and "head_dim" not in given):
        hidden = given.get("hidden_size", cls.hidden_size)
        given["head_dim"] = hidden // given.get("num_attention_heads", cls.num_attention_heads)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if not problems:
        return cls(**given, rope_parameters=rope)
    raise ValueError(f"config of {model_type} is not understood: " + "; ".join(problems))


def config_to_dict(config: Qwen3Config) -> dict[str, Any]:
    """The fields of config.json in the hub's dialect, which transformers 4 and 5 and every inference engine read."""
    values: dict[str, Any] = {"architectures": [config.architecture], "model_type": config.model_type}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values[item.name] = list(value) if isinstance(value, tuple) else value
    rope = {k: v for k, v in dataclasses.asdict(config.rope_parameters).items() if v is not None}
    values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    if rope["truncate"]:
        rope.pop("truncate")  # the default, which other types do not have
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    for name in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id"):
        if values[name] is None:
            del values[name]
    if config.model_type == "qwen3_moe":
        del values["max_window_layers"]
        values.pop("layer_types", None)
    return values


def _read_rope(given: dict[str, Any], problems: list[str]) -> RopeParameters:
    """Takes the rope fields of either dialect out of `given`."""
    scaling = given.pop("rope_scaling", None)
    parameters = given.pop("rope_parameters", None)
    theta = given.pop("rope_theta", None)
    rope: dict[str, Any] = dict(scaling or parameters or {})
    legacy_type = rope.pop("type", None)
    rope.setdefault("rope_type", legacy_type or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = 10000.0 if theta is None else theta
    partial = {rope.pop("partial_rotary_factor", 1.0), given.pop("partial_rotary_factor", 1.0)} - {None, 1.0}
    if partial:
        problems.append(f"partial_rotary_factor={partial.pop()!r} is not supported (only 1.0)")
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(f"rope_type {rope['rope_type']!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        return RopeParameters()
    if rope["rope_type"] == "default":
        # Config writers leave the scaling fields of other types behind; the default type reads none of them.
        return RopeParameters(rope_theta=rope["rope_theta"])
    known = {f.name for f in dataclasses.fields(RopeParameters)}
    for name in sorted(set(rope) - known):
        problems.append(f"unknown rope field {name}={rope.pop(name)!r}")
    if rope.get("factor") is None and rope["rope_type"] != "yarn":
        problems.append(f"rope_type {rope['rope_type']!r} needs a factor")
    if rope["rope_type"] == "yarn":
        outer = given.pop("original_max_position_embeddings", None)
        if outer is not None:
            rope["original_max_position_embeddings"] = outer
        if rope.get("factor") is None and rope.get("original_max_position_embeddings") is None:
            problems.append("rope_type 'yarn' needs a factor or original_max_position_embeddings")
    return RopeParameters(**rope)


def _invalid_values(config: Qwen3Config) -> list[str]:
    """What is wrong with the values of `config`, each as one clause."""
    problems = []
    positive = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    positive += ["num_key_value_heads", "head_dim", "max_position_embeddings"]
    if isinstance(config, Qwen3MoeConfig):
        positive += ["moe_intermediate_size", "decoder_sparse_step"]
    for name in positive:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            problems.append(f"{name}={value!r} must be a positive integer")
    if problems:
        return problems
    if config.hidden_act != "silu":
        problems.append(f"hidden_act={config.hidden_act!r} is not supported (only 'silu')")
    if config.attention_dropout:
        problems.append(f"attention_dropout={config.attention_dropout} is not supported (only 0)")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        problems.append(f"head_dim={config.head_dim} must be even: rotary embeddings turn pairs")
    if config.layer_types is not None:
        unknown = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
        if unknown or len(config.layer_types) != config.num_hidden_layers:
            problems.append(
                f"layer_types must name full_attention or sliding_attention for each of {config.num_hidden_layers} layers; "
                f"it has {len(config.layer_types)} entries" + (f" and {', '.join(unknown)}" if unknown else "")
            )
    if any(window is not None and window <= 0 for window in config.layer_windows):
        problems.append(f"sliding_window={config.sliding_window} must be positive")
    if isinstance(config, Qwen3MoeConfig) and config.moe_layers:
        if not 1 <= config.num_experts_per_tok <= config.num_experts:
            problems.append(
                f"num_experts_per_tok={config.num_experts_per_tok} must be between 1 and num_experts={config.num_experts}"
            )
    return problems


_HUB_ROPE = RopeParameters(rope_theta=1e6)
NAMED_CONFIGS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        max_position_embeddings=40960, tie_word_embeddings=True, rope_parameters=_HUB_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        num_hidden_layers=48, max_position_embeddings=40960, norm_topk_prob=True, rope_parameters=_HUB_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-235b-a22b": Qwen3MoeConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536,
        max_position_embeddings=40960, norm_topk_prob=True, rope_parameters=_HUB_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
}  # fmt: skip
"""The published shapes, by name: for benchmarks and for `moe-jax check --random-config`."""
