"""Finds the weights and the adapter that belong together, and compares the weights with those the adapter was trained on."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.checkpoint.companions import TOKENIZER_FILES, read_json
from moe_jax.checkpoint.hf_files import downloaded
from moe_jax.checkpoint.stored import weights_fingerprint

ADAPTER_FOLDER = "adapter"
"""The folder in the output of a run that gets its adapter."""


class ModelSource(NamedTuple):
    """Weights, and optionally their adapter."""

    weights: str
    """A folder or hub id."""
    adapter: str | None
    """A folder or hub id; None for a model without an adapter."""
    tokenizer: str | None
    """The adapter's folder, if it has a tokenizer; None: the weights' own."""


def source_of(model: str | Path, adapter: str | Path | None = None) -> ModelSource:
    """Returns the weights and the adapter that belong together.

    Args:
      model: a folder or hub id with weights, or the output folder of a run that trained a model. Or the output folder of a run
        that trained an adapter, or the adapter's folder: they name their weights.
      adapter: a folder or hub id of an adapter for weights.

    Raises:
      FileNotFoundError: the weights that an adapter's folder names are gone.
      ValueError: `adapter` is given for a folder that has one, or an adapter's folder does not name its weights.
    """
    folder = Path(model).expanduser()
    found = _adapter_in(folder)
    if found is None:
        is_run = (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file()
        weights = str(folder / "model" if is_run else model)
        return ModelSource(weights, None if adapter is None else str(adapter), None if adapter is None else _tokenizer(adapter))
    if adapter is not None:
        raise ValueError(f"{model} is itself an adapter: give its weights instead, or leave out {adapter}")
    base = read_json(found / CONFIG_FILE).get("base_model_name_or_path")
    if base is None:
        raise ValueError(f"{found / CONFIG_FILE} does not name its weights: give them as the model, and {found} as the adapter")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise FileNotFoundError(
            f"the weights of the adapter in {found} are no longer at {base}: give them as the model, and {found} as the adapter"
        )
    return ModelSource(base, str(found), _tokenizer(found))


def vocab_size_with(adapter: str | None, vocab_size: int) -> int:
    """Returns the number of tokens of a model of `vocab_size` tokens with the adapter, whose new tokens may extend it."""
    if adapter is None:
        return vocab_size
    folder = Path(adapter).expanduser()
    folder = folder if folder.is_dir() else downloaded(adapter, [CONFIG_FILE])
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    tokens = config.get("trainable_token_indices") or []
    of_tables = tokens.values() if isinstance(tokens, dict) else [tokens]
    return max([vocab_size, *(1 + max(ids) for ids in of_tables if ids)])


def _adapter_in(folder: Path) -> Path | None:
    """Returns `folder` if it holds an adapter, or the adapter's folder of a run's output; None for anything else."""
    if (folder / "config.json").is_file():
        return None
    return next((place for place in (folder, folder / ADAPTER_FOLDER) if (place / CONFIG_FILE).is_file()), None)


def _tokenizer(adapter: str | Path) -> str | None:
    folder = Path(adapter).expanduser()
    return str(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base_weights.json"
"""The file of an adapter's folder for the base's `weights_fingerprint`. PEFT does not read the file."""
FINGERPRINT = "fingerprint"
"""The file's only entry."""

_logger = logging.getLogger(__name__)


def fingerprint_of_base(source: str | None) -> str | None:
    """Returns the fingerprint of the folder that a model came from; None if there is none, or it is gone."""
    try:
        return None if source is None else weights_fingerprint(source)
    except (OSError, ValueError):
        return None


def warn_of_another_base(source: str | None, adapter: Path, config: dict[str, Any]) -> None:
    """Warns if an adapter was trained on other weights than those in `source`, as far as its files show.

    Compares fingerprints. For an adapter without one, it compares the last names of the two bases.

    Args:
      source: the folder of the weights; None for a model from memory, whose origin is unknown.
      adapter: the adapter's folder.
      config: its adapter_config.json.
    """
    found = fingerprint_of_base(source)
    if found is None:
        return
    named, noted = config.get("base_model_name_or_path"), _noted(adapter / BASE_FILE)
    if noted is not None:
        if noted != found:
            of = "" if named is None else f" ({named})"
            _logger.warning(
                "the adapter in %s was trained on other weights%s than the ones in %s, so its changes do not fit them",
                adapter, of, source,
            )  # fmt: skip
    elif named and _last_name(named) != _last_name(str(source)):
        _logger.warning(
            "the adapter in %s names the weights %s, but is added to %s: its files do not show whether they are the same",
            adapter, named, source,
        )  # fmt: skip


def _noted(file: Path) -> str | None:
    """Returns the fingerprint in an adapter's folder; None if none can be read."""
    try:
        return json.loads(file.read_text())[FINGERPRINT]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_name(folder_or_hub_id: str) -> str:
    """Returns the name of a model without its owner or folders; a folder of the hub's cache has it above its snapshots."""
    cached = [part for part in Path(folder_or_hub_id).parts if part.startswith("models--")]
    return (cached[-1].rsplit("--", 1)[-1] if cached else Path(folder_or_hub_id).name).lower()
