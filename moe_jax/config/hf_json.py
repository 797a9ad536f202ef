"""Reads and writes config.json.

Reading is a checked contract. Every field of a config.json is handled, listed in `IGNORED_FIELDS` because it cannot change the
model's results, or refused by name. Both dialects are read: the hub's (`num_experts`, `rope_theta`, `rope_scaling`) and
transformers 5's (`num_local_experts`, `rope_parameters`).
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, get_type_hints

from moe_jax.config.base import ModelConfig, RopeParameters, wrong_types
from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config, KimiK2Config
from moe_jax.config.families import FAMILIES
from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig

_logger = logging.getLogger(__name__)

IGNORED_FIELDS = frozenset(
    "architectures transformers_version torch_dtype dtype use_cache _name_or_path output_router_logits "
    "output_attentions output_hidden_states return_dict _attn_implementation _experts_implementation "
    "_attn_implementation_autoset unsloth_version unsloth_fixed "
    "quantization_config "  # how weights are stored: `checkpoint.quantised` reads it
    # transformers 4 wrote these into every config: for classifiers, encoders, its memory use and file formats,
    "id2label label2id problem_type finetuning_task task_specific_params tokenizer_class prefix "
    "is_decoder cross_attention_hidden_size tie_encoder_decoder sep_token_id decoder_start_token_id "
    "chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss "
    # and for generation, whose settings belong in generation_config.json.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p "
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens".split()
)

FILE_TYPES: dict[str, Any] = dict.fromkeys(("layer_types", "mlp_layer_types"), tuple[str, ...]) | dict(
    alpha=float, partial_rotary_factor=float, rope_theta=float, rotary_dim=int, attn_type_list=tuple[int, ...]
)
"""Types of values that config classes convert to fields. They are checked before, since a conversion of others may crash."""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")

_OWN: tuple[type[ModelConfig], ...] = (Qwen3Config, Qwen3MoeConfig, DeepseekV2Config, DeepseekV3Config, KimiK2Config)

CONFIG_CLASSES: dict[str, type[ModelConfig]] = {cls.model_type: cls for cls in _OWN + FAMILIES}


def load_config(folder: str | Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises FileNotFoundError, or a ValueError that lists every unknown field."""
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
    """Returns the config for the fields of a config.json, in the hub's dialect or in transformers 5's.

    Raises:
      ValueError: model_type is unknown, or fields are unknown or have unsupported values; one error lists all problems.
        Values of wrong types have an error of their own, before the others.
    """
    model_type = values.get("model_type")
    if (cls := CONFIG_CLASSES.get(str(model_type))) is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(CONFIG_CLASSES))}. The experts alone "
            "work in any network: moe_jax.MoE and moe_jax.kernels.experts_mlp (docs/your_own_model.md). To add a family: "
            'CONTRIBUTING.md, "A model"'
        )
    given = {k: v for k, v in values.items() if k not in IGNORED_FIELDS and k != "model_type"}
    if problems := _wrong_types(cls, given):
        raise ValueError(f"config of {model_type} is not understood: " + "; ".join(problems))
    cls.read_rope(given, problems)
    rope = _read_rope(cls, given, problems)
    cls.read_dialects(given, problems)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in sorted(set(given) - known):
        problems.append(f"unknown field {name}={given.pop(name)!r}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        config = cls(**given, rope_parameters=rope)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(f"config of {model_type} is not understood: " + "; ".join(problems))
    return config


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json in the hub's dialect, which transformers 4 and 5 and every inference engine read."""
    values: dict[str, Any] = {"architectures": [config.architecture], "model_type": config.model_type}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values[item.name] = list(value) if isinstance(value, tuple) else value
    rope = {k: v for k, v in dataclasses.asdict(config.rope_parameters).items() if v is not None}
    if rope["rope_type"] == "yarn":  # transformers refuses it without a factor
        rope["factor"] = config.rope_parameters.yarn_factor(config.max_position_embeddings)
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


def _wrong_types(cls: type[ModelConfig], given: dict[str, Any]) -> list[str]:
    """Returns one message per value of a wrong type. A null is right where a dialect or a default may replace it."""
    hints, own = get_type_hints(cls), {field.name: field.name for field in dataclasses.fields(cls)}
    types = FILE_TYPES | {name: hints[field] for name, field in (own | getattr(cls, "fields", {})).items()}
    types |= {name: types[name] | tuple[types[name], ...] for name in cls.per_layer & types.keys()}
    needed = set(ModelConfig.positive) - {"num_key_value_heads"}
    skipped = {"rope_parameters", *getattr(cls, "ignored", ())}
    values = {name: value for name, value in given.items() if name not in skipped and (value is not None or name in needed)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    problems = wrong_types(values, types, set(cls.positive) - cls.per_layer)
    ropes = [rope for name in ("rope_scaling", "rope_parameters") if isinstance(rope := given.get(name), dict)]
    used = [{name: value for name, value in rope.items() if value is not None} for rope in ropes]
    return problems + [f"rope field {problem}" for rope in used for problem in wrong_types(rope, FILE_TYPES)]


def _read_rope(cls: type[ModelConfig], given: dict[str, Any], problems: list[str]) -> RopeParameters:
    """Removes the rope fields of either dialect from `given` and returns them."""
    scaling = given.pop("rope_scaling", None)
    parameters = given.pop("rope_parameters", None)
    theta = given.pop("rope_theta", None)
    for name, fields in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if fields and not isinstance(fields, dict):
            problems.append(f"{name}={fields!r} must be an object of fields or null")
            return RopeParameters()
        if any(isinstance(value, dict) for value in (fields or {}).values()):
            problems.append(f"{name} for each type of layer ({', '.join(fields)}) is not supported (only one for all layers)")
            return RopeParameters()
    default = {name: value for name, value in vars(cls.rope_parameters).items() if name != "rope_theta" and value is not None}
    rope: dict[str, Any] = dict(scaling or parameters or default)
    legacy_type = rope.pop("type", None)
    rope.setdefault("rope_type", legacy_type or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = cls.rope_parameters.rope_theta if theta is None else theta
    found = {fields.pop("partial_rotary_factor", None) for fields in (rope, given)} - {None}
    if len(found) > 1:
        problems.append(f"partial_rotary_factor has two values, {sorted(found)}")
    elif found and "partial_rotary_factor" in getattr(cls, "fields", ()):
        given["partial_rotary_factor"] = found.pop()
    elif found - {1.0}:
        problems.append(f"partial_rotary_factor={found.pop()!r} is not supported (only 1.0)")
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(f"rope_type {rope['rope_type']!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        return RopeParameters()
    if rope["rope_type"] == "default":
        # Writers of configs may leave scaling fields of other types; the default type reads none of them.
        return RopeParameters(rope_theta=rope["rope_theta"])
    if "attn_factor" in rope:
        name = "attn_factor"
        _logger.warning("rope field %s=%r is ignored, as transformers does: it reads attention_factor", name, rope.pop(name))
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
