"""The identity of a run: compares the checkpoints in an output folder with the requested run."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_jax.checkpoint.stored import weights_fingerprint
from moe_jax.checkpoint.training import finished_steps
from moe_jax.config import ModelConfig, config_to_dict
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data.tokenization import tokenizer_fingerprint
from moe_jax.train.model_of_run import LORA, WEIGHTS
from moe_jax.train.starting_weights import MODEL, same_weights, values_of

PRECISION, FP8_DENSE = "precision", "fp8_dense"
"""Names of entries."""

BEFORE_THEY_WERE_NOTED = {"moment_dtype": "float32", "optimizer": "adamw"}
"""Entries that older runs lack, with the value that all of them had."""

MAX_KEYS = 5
"""A message lists this many differing keys of an object, and counts the rest: two architectures differ in dozens."""
_logger = logging.getLogger(__name__)


def same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> dict[str, Any]:
    """Returns the identity that the run in `output` continues with.

    Starting weights are compared if the run recorded them in the same form. It is a hash of a checkpoint's weights, or
    values of a model passed from Python. Otherwise the run keeps its own record, if any, and a warning is logged.

    Raises:
      ValueError: the folder holds another run; the message names what differs.
    """
    saved = BEFORE_THEY_WERE_NOTED | saved
    kept = {name: value for name, value in current.items() if name != MODEL}
    # Through JSON, as it was saved: tuples are lists there.
    different = [clause for name, value in kept.items() for clause in _differences(name, saved.get(name), value)]
    noted, asked = saved.get(MODEL), current[MODEL]
    if type(noted) is not type(asked):
        if is_first_process():
            how = "did not note its starting weights" if noted is None else "noted its starting weights in another way"
            _logger.warning("the run in %s %s, so nothing tells whether `model` is the one that it began with", output, how)
    elif not same_weights(noted, asked):
        different.append("model: its weights are not those that the run began with")
    if different:
        raise ValueError(f"{output} holds another run; choose another output folder. Different: " + "; ".join(different))
    return kept if noted is None else kept | {MODEL: noted}


def identity_of(settings: RunSettings, config: ModelConfig, tokenizer: Any, data: str) -> dict[str, Any]:
    """Returns the facts that must be equal for a run to continue (except the starting weights), as read back from JSON.

    Args:
      data: the fingerprint of the data.
    """
    asked = settings.lora_of(tokenizer)
    lora = None if asked is None else json.loads(json.dumps(asdict(asked)))
    if lora is not None:
        # Runs that began before these settings existed have no such entries.
        later = "dropout", "modules_to_save", "trainable_token_indices"
        lora = {name: value for name, value in lora.items() if value or name not in later}
    return {name: getattr(settings, name) for name in settings.RESUME_MUST_MATCH} | {
        LORA: lora,
        WEIGHTS: None if settings.weights == "whole" else settings.weights,
        PRECISION: None if settings.precision == "bf16" else settings.precision,
        FP8_DENSE: sorted(set(settings.fp8_dense)) or None,
        "config": config_to_dict(config),
        "data": data,
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }


def with_weights(identity: dict[str, Any], model: Decoder | None, source: str) -> dict[str, Any]:
    """Returns the identity with the starting weights: the passed model's, or the folder's or hub id's."""
    return identity | {MODEL: weights_fingerprint(source) if model is None else values_of(model)}


def saved_run(output: str | Path) -> tuple[int, dict[str, Any]]:
    """Returns the newest checkpoint's step and the run's identity; 0 and {} without one.

    A checkpoint that cannot be read counts as none here; `TrainingCheckpoints` refuses it.
    """
    folder = Path(output).expanduser() / "checkpoints"
    try:
        step = finished_steps(folder)[-1]
        return step, json.loads((folder / str(step) / "position" / "metadata").read_text())["identity"]
    except (IndexError, OSError, ValueError, KeyError):
        return 0, {}


def _differences(name: str, saved: Any, now: Any) -> list[str]:
    """Returns a clause for each differing entry of an identity; for objects it lists only differing keys."""
    if saved == now:
        return []
    if isinstance(saved, dict) and isinstance(now, dict):
        inside = [clause for key in (saved | now) for clause in _differences(f"{name}.{key}", saved.get(key), now.get(key))]
        rest = len(inside) - MAX_KEYS
        return inside[:MAX_KEYS] + ([f"and {rest} more in {name}"] if rest > 0 else [])
    return [f"{name}: checkpoint {_said(name, saved)}, now {_said(name, now)}"]


def _said(name: str, value: Any) -> str:
    """Describes a value; a missing one is the default."""
    if value is None:
        return {WEIGHTS: "'whole'", PRECISION: "'bf16'"}.get(name, "none")
    return f"a {name}" if isinstance(value, dict) else repr(value)
