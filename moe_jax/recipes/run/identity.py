"""The identity of a run: compares the checkpoints in an output folder with the run that is asked for."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.models.decoder import Decoder, fp8_refusal
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.model_of_run import BASE, LORA, WEIGHTS
from moe_jax.train.starting_weights import MODEL, same_weights

PRECISION, FP8_DENSE = "precision", "fp8_dense"
"""Names of entries."""

MAX_KEYS = 5
"""A message lists this many differing keys of an object, and counts the rest: two architectures differ in dozens."""
_logger = logging.getLogger(__name__)


def same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> dict[str, Any]:
    """Returns the identity that the run in `output` continues with.

    Starting weights are compared if the run noted them in the same way. That is a hash of a checkpoint's weights, or values of
    a model passed from Python. Otherwise the run continues with what it noted, if anything, and a warning.

    Raises:
      ValueError: the folder holds another run; the message names what differs.
    """
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


def entries_of(settings: RunSettings, names: Iterable[str]) -> dict[str, Any]:
    """Returns the entries of a run's identity that follow from its settings, as they come back from JSON.

    Args:
      names: the settings that may not change when the run continues, beside its adapters and its precision.
    """
    lora = None if settings.lora is None else json.loads(json.dumps(asdict(settings.lora)))
    if lora is not None and not lora["dropout"]:
        # Runs that began before there was dropout have no such entry.
        del lora["dropout"]
    return {name: getattr(settings, name) for name in names} | {
        LORA: lora,
        WEIGHTS: None if settings.weights == "whole" else settings.weights,
        PRECISION: None if settings.precision == "bf16" else settings.precision,
        FP8_DENSE: sorted(set(settings.fp8_dense)) or None,
    }


def check_model(settings: RunSettings, config: ModelConfig, tokenizer: Any, model: Decoder | None) -> None:
    """Refuses a model or a tokenizer that the run cannot have.

    Args:
      model: the model that was passed, whose dtype counts in place of the settings'.

    Raises:
      ValueError: the model has adapters already, or does not multiply in FP8. Or it has no embedding for some of the
        tokenizer's tokens: the loss would be NaN at the first document with one.
    """
    if model is not None and jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        raise ValueError(
            "the model has adapters already, and a checkpoint of the run would lack the weights beside them: pass the model "
            "without adapters, and the settings' lora"
        )
    if settings.precision != "bf16":
        dtype = "bfloat16" if model is None else model.dtype
        if (reason := fp8_refusal(config, dtype, settings.fp8_dense)) is not None:
            raise ValueError(f"precision={settings.precision!r}: {reason}; take precision 'bf16'")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model's vocabulary {config.vocab_size}; take the model's "
            "own tokenizer"
        )


def check_steps(output: Path, steps_done: int, steps: int) -> None:
    """Refuses to continue a run to an earlier step than it has reached.

    Raises:
      ValueError: it has done more than `steps`.
    """
    if steps < steps_done:
        raise ValueError(
            f"{output} holds {steps_done} steps of this run: steps={steps} would end before; take {steps_done} or more"
        )


def base_of(settings: RunSettings, model: Decoder | None) -> dict[str, Any]:
    """Returns the entry of a checkpoint's position for the weights that are not in it; empty for a run of all parameters."""
    if settings.lora is None:
        return {}
    folder = Path(settings.model).expanduser()
    named = str(folder.resolve()) if folder.is_dir() else settings.model
    return {BASE: named if model is None else None}


def _differences(name: str, saved: Any, now: Any) -> list[str]:
    """Returns a clause for each entry of an identity that differs; of two objects only the keys that do."""
    if saved == now:
        return []
    if isinstance(saved, dict) and isinstance(now, dict):
        inside = [clause for key in (saved | now) for clause in _differences(f"{name}.{key}", saved.get(key), now.get(key))]
        rest = len(inside) - MAX_KEYS
        return inside[:MAX_KEYS] + ([f"and {rest} more in {name}"] if rest > 0 else [])
    return [f"{name}: checkpoint {_said(name, saved)}, now {_said(name, now)}"]


def _said(name: str, value: Any) -> str:
    """Describes a value; one that is not there is the default."""
    if value is None:
        return {WEIGHTS: "'whole'", PRECISION: "'bf16'"}.get(name, "none")
    return f"a {name}" if isinstance(value, dict) else repr(value)
