"""Finds the weights and the adapter that a name on the command line stands for: a model, a run's folder, or an adapter's."""

from pathlib import Path
from typing import NamedTuple

from moe_jax.adapters.save import CONFIG_FILE
from moe_jax.checkpoint.companions import TOKENIZER_FILES, read_json

ADAPTER_FOLDER = "adapter"
"""The folder in the output of a run that gets its adapter."""


class ModelSource(NamedTuple):
    """Weights, and perhaps an adapter beside them."""

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
      ValueError: `adapter` beside a folder that has one, or an adapter's folder names no weights.
    """
    found = _adapter_in(Path(model).expanduser())
    if found is None:
        weights = str(_model_in(Path(model).expanduser()) or model)
        return ModelSource(weights, None if adapter is None else str(adapter), None if adapter is None else _tokenizer(adapter))
    if adapter is not None:
        raise ValueError(f"{model} is an adapter itself; give the weights in its place, or leave {adapter} out")
    base = read_json(found / CONFIG_FILE).get("base_model_name_or_path")
    if base is None:
        raise ValueError(f"{found / CONFIG_FILE} names no weights: give them as the model, and {found} as the adapter")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise FileNotFoundError(
            f"the weights of the adapter in {found} are no longer at {base}: give them as the model, and {found} as the adapter"
        )
    return ModelSource(base, str(found), _tokenizer(found))


def _adapter_in(folder: Path) -> Path | None:
    """Returns the adapter's folder that `folder` is, or has as a run's output; None for anything else."""
    if (folder / "config.json").is_file():
        return None
    return next((place for place in (folder, folder / ADAPTER_FOLDER) if (place / CONFIG_FILE).is_file()), None)


def _model_in(folder: Path) -> Path | None:
    """Returns the model's folder in the output of a run that trained all parameters; None for anything else."""
    is_run = (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file()
    return folder / "model" if is_run else None


def _tokenizer(adapter: str | Path) -> str | None:
    folder = Path(adapter).expanduser()
    return str(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
