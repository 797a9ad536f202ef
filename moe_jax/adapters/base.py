"""The weights that an adapter was trained beside: noted in its folder, and compared with those that it is added to."""

import json
import logging
from pathlib import Path
from typing import Any

from moe_jax.checkpoint.fingerprint import weights_fingerprint

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
    """Warns that an adapter was trained beside other weights than those in `source`, as far as its files tell.

    Fingerprints are compared. An adapter from elsewhere has none, and the last names of the two bases are compared.

    Args:
      source: the folder of the weights; None for a model from memory, of which nothing is known.
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
                "the adapter in %s was trained beside other weights%s than those in %s: its changes do not belong to them",
                adapter, of, source,
            )  # fmt: skip
    elif named and _last_name(named) != _last_name(str(source)):
        _logger.warning(
            "the adapter in %s names %s as its weights, and is added to those in %s: nothing in its files tells more",
            adapter, named, source,
        )  # fmt: skip


def _noted(file: Path) -> str | None:
    """Returns the fingerprint in an adapter's folder; None if there is none that can be read."""
    try:
        return json.loads(file.read_text())[FINGERPRINT]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_name(folder_or_hub_id: str) -> str:
    """Returns the name of a model without its owner or folders; a folder of the hub's cache has it above its snapshots."""
    cached = [part for part in Path(folder_or_hub_id).parts if part.startswith("models--")]
    return (cached[-1].rsplit("--", 1)[-1] if cached else Path(folder_or_hub_id).name).lower()
