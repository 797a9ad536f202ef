"""config.json, read and written.

Reading is a checked contract: every field of a config.json is handled, or stands in `IGNORED_FIELDS` because it cannot
change what the model computes, or is refused by name. Both dialects are read: the hub's (`num_experts`, `rope_theta`,
`rope_scaling`) and transformers 5's (`num_local_experts`, `rope_parameters`).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from moe_jax.config.base import ModelConfig, RopeParameters
from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config
from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig

IGNORED_FIELDS = frozenset(
    "architectures transformers_version torch_dtype dtype use_cache _name_or_path output_router_logits "
    "output_attentions output_hidden_states return_dict _attn_implementation _experts_implementation "
    "quantization_config".split()  # how weights are stored: `checkpoint.fp8` reads it
)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")

CONFIG_CLASSES: dict[str, type[ModelConfig]] = {
    c.model_type: c for c in (Qwen3Config, Qwen3MoeConfig, DeepseekV2Config, DeepseekV3Config)
}


def load_config(folder: str | Path) -> ModelConfig:
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


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
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
    cls.read_dialects(given, problems)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in sorted(set(given) - known):
        problems.append(f"unknown field {name}={given.pop(name)!r}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if not problems:
        return cls(**given, rope_parameters=rope)
    raise ValueError(f"config of {model_type} is not understood: " + "; ".join(problems))


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
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
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if values[name] is None and getattr(type(config), name) is None:
            del values[name]
    config.write_dialect(values)
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
