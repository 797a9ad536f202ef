"""Writes the adapters of a model as a folder that PEFT, vLLM and SGLang load."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from moe_jax.adapters.names import (
    PREFIX,
    ModulePart,
    changes_in_files,
    modules_of,
    parameter_name,
    whole_modules,
)
from moe_jax.adapters.source import BASE_FILE, CONFIG_FILE, FINGERPRINT, fingerprint_of_base
from moe_jax.adapters.token_rows import EMBEDDING, trained_tables
from moe_jax.checkpoint.companions import TOKENIZER_FILES, tokenizer_contents, write_json
from moe_jax.checkpoint.folders import replaced_folder
from moe_jax.checkpoint.hf_names import hf_tensors, host_array
from moe_jax.layers.lora import Adapter, has_adapters
from moe_jax.models.decoder import Decoder
from moe_jax.runtime.processes import is_first_process

WEIGHTS_FILE = "adapter_model.safetensors"
ROWS = "token_adapter.trainable_tokens_delta"
"""PEFT's name of the rows of a table that are trained alone, after the table's name."""


def save_adapter(
    model: Decoder,
    folder: str | Path,
    *,
    base: str | None = None,
    base_weights: str | None = None,
    tokenizer_from: str | Path | None = None,
    chat_template: str | None = None,
) -> None:
    """Writes the adapters into `folder` in f32 under PEFT's names, with the tokenizer's files.

    Each expert is written separately, or all together (as PEFT 0.19 does) if checkpoints of this model do so.

    The folder gets adapter_model.safetensors, adapter_config.json and base_weights.json (`adapters.source`). It is replaced as
    a whole at the end. Its config gives the experts' rank, and other ranks by module. The number alpha / rank is the same
    everywhere, because vLLM reads only one. A factor b with another scale is multiplied by the ratio of the scales. Factors
    that experts share are written for each expert. Weights that are trained whole are written as they are.

    Args:
      base: the folder or hub id of the frozen weights, for readers of the file. Default: the folder that they came from.
      base_weights: their `checkpoint.stored.weights_fingerprint`, written for `load_adapter` to compare. Default: computed from
        the folder that they came from, if it still exists.
      tokenizer_from, chat_template: as in `save_pretrained`.

    Raises:
      ValueError: the model has no adapters.
      FileNotFoundError: `tokenizer_from` has no tokenizer files, or is neither a folder nor a model on the hub.
      FileExistsError: `folder` is a file, or has files and no adapter_config.json.
    """
    if not has_adapters(model):
        raise ValueError("the model has no adapters to save")
    modules = [module for module in modules_of(model) if module.target.found is not None]
    tokenizer = tokenizer_contents(tokenizer_from, model.source, chat_template)
    main = next((module for module in modules if module.expert is not None), modules[0])
    scale = _adapter(main).scale
    tensors: dict[str, np.ndarray] = {}
    for module, (a, b) in changes_in_files(model, scale):
        if module.target.kind == "embedding":
            # PEFT's factors belong to the transposed table.
            tensors[f"{PREFIX}{module.name}.lora_embedding_A"] = np.ascontiguousarray(b.T)
            tensors[f"{PREFIX}{module.name}.lora_embedding_B"] = np.ascontiguousarray(a.T)
            continue
        name = module.name
        if module.is_fused:
            name = name.rsplit(".", 2)[0] + ("" if module.projection == "down_proj" else ".base_layer")
            a, b = a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(b)
    for each in whole_modules(model):
        if each.is_trained:
            tensors[f"{PREFIX}{each.name}.weight"] = np.ascontiguousarray(each.on_host)
    for name, table in trained_tables(model).items():
        tensors[f"{PREFIX}{name}.{ROWS}"] = host_array(table.token_rows.rows[...])
    noted = base_weights or fingerprint_of_base(model.source)
    replaces = CONFIG_FILE, BASE_FILE, "adapter_model*", *(TOKENIZER_FILES if tokenizer else ())
    with replaced_folder(folder, replaces, marker=CONFIG_FILE) as target:
        if is_first_process():
            save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
            write_json(target / CONFIG_FILE, _config(base or model.source, model, modules, main, scale))
            if noted is not None:
                write_json(target / BASE_FILE, {FINGERPRINT: noted})
            for name, content in tokenizer.items():
                (target / name).write_bytes(content)


def _adapter(module: ModulePart) -> Adapter:
    assert module.target.found is not None
    return module.target.found


def _config(base: str | None, model: Decoder, modules: list[ModulePart], main: ModulePart, scale: float) -> dict[str, Any]:
    rank = _adapter(main).rank
    # PEFT treats these as parameters of modules, and refuses dropout with any.
    parameters = _dense_beside_experts(model, modules) + sorted({_parameter(module) for module in modules if module.is_fused})
    ranks = {_pattern(module): _adapter(module).rank for module in modules if _adapter(module).rank != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: scale * own for pattern, own in ranks.items()},
        "target_modules": sorted({module.leaf for module in modules if not module.is_fused}),
        "target_parameters": parameters or None,
        "modules_to_save": _saved_names(model) or None,
        **_tokens(model),
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0 if parameters else _adapter(main).dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _tokens(model: Decoder) -> dict[str, Any]:
    """Returns the entry of tokens whose rows are trained alone, if any. In PEFT a list means the embedding."""
    tokens = {name.rsplit(".", 1)[-1]: list(table.token_rows.tokens) for name, table in trained_tables(model).items()}
    only = EMBEDDING.rsplit(".", 1)[-1]
    return {"trainable_token_indices": tokens[only] if tokens.keys() == {only} else tokens} if tokens else {}


def _saved_names(model: Decoder) -> list[str]:
    """Returns the names of modules that are trained whole: the last part of a name if no other module ends in it, else all."""
    trained = {each.name for each in whole_modules(model) if each.is_trained}
    others = [name for tensor in hf_tensors(model.config) if (name := tensor.name.removesuffix(".weight")) not in trained]
    leaves = {name: name.rsplit(".", 1)[-1] for name in trained}
    return sorted({name if any(other.endswith(leaf) for other in others) else leaf for name, leaf in leaves.items()})


def _dense_beside_experts(model: Decoder, modules: list[ModulePart]) -> list[str]:
    """Returns the weights of dense blocks in a model with experts.

    In such a model PEFT would apply a module "gate_proj" only to the experts, not to dense blocks.
    """
    has_experts = model.config.experts is not None
    return sorted({f"{_parent_and_leaf(module)}.weight" for module in modules if has_experts and module.target.kind == "mlp"})


def _parameter(module: ModulePart) -> str:
    """Returns the end of the name of a layer's parameter that holds all experts, such as mlp.experts.down_proj."""
    return ".".join(parameter_name([module]).rsplit(".", 3)[1:])


def _parent_and_leaf(module: ModulePart) -> str:
    return ".".join(module.name.rsplit(".", 2)[1:])


def _pattern(module: ModulePart) -> str:
    """Returns the key under which PEFT finds a module's rank: a regular expression for the end of its name."""
    if module.is_fused:
        return re.escape(_parameter(module))
    if module.target.kind in ("router", "mlp"):
        # A dense block's projections have the same names as an expert's. PEFT treats routers, and dense blocks of models with
        # experts, as parameters.
        return re.escape(_parent_and_leaf(module)) + r"(\.weight)?"
    return module.leaf
