"""Adapters of a run: checked before weights are read, and noted in its checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from moe_jax.adapters.add import LoraSummary, planned_lora
from moe_jax.config import ModelConfig
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.recipes.finetuning.export import AdaptedRun, ExportedRun
from moe_jax.recipes.finetuning.lora_settings import lora_problems
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.train.adapted_run import BASE, LORA, WEIGHTS


def check_lora(
    settings: FinetuneSettings, config: ModelConfig, model: Decoder | None, parallelism: Parallelism | None
) -> LoraSummary | None:
    """Returns what the run's adapters will train; None for a run of all parameters.

    Raises:
      ValueError: the model that was passed has adapters already, or lies on a mesh on which adapters do not train. Or the
        config's model cannot have the adapters that the settings ask for.
    """
    refuse_adapted(model)
    if settings.lora is None:
        return None
    mesh = {} if parallelism is None else dict(parallelism.mesh.shape)
    if problems := lora_problems(settings.lora, mesh, settings.shard_optimizer):
        raise ValueError("FinetuneSettings: " + "; ".join(problems))
    return planned_lora(config, settings.lora).summary


def refuse_adapted(model: Decoder | None) -> None:
    """Refuses a model that was passed to a run with adapters.

    Raises:
      ValueError: it has some.
    """
    if model is not None and jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        raise ValueError(
            "the model has adapters already, and a checkpoint of the run would lack the weights beside them: pass the model "
            "without adapters, and the settings' lora"
        )


def identity_of_lora(settings: AdaptedRun) -> dict[str, Any]:
    """Returns the adapters' entries of a run's identity, as they come back from JSON."""
    lora = None if settings.lora is None else json.loads(json.dumps(asdict(settings.lora)))
    if lora is not None and not lora["dropout"]:
        # Runs that began before there was dropout have no such entry.
        del lora["dropout"]
    return {LORA: lora, WEIGHTS: None if settings.weights == "whole" else settings.weights}


def base_of(settings: ExportedRun, model: Decoder | None) -> dict[str, Any]:
    """Returns the entry of a checkpoint's position for the weights that are not in it; empty for a run of all parameters."""
    if settings.lora is None:
        return {}
    folder = Path(settings.model).expanduser()
    named = str(folder.resolve()) if folder.is_dir() else settings.model
    return {BASE: named if model is None else None}
