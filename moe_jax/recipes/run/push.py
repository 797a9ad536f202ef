"""Uploads the exported model or adapter of a run, with its card, to the Hugging Face hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open

from moe_jax.adapters.save import WEIGHTS_FILE
from moe_jax.adapters.source import ADAPTER_FOLDER, CONFIG_FILE
from moe_jax.checkpoint.companions import read_json
from moe_jax.recipes.run.card import CARD, exported, write_card


def push(run: str | Path, repository: str, *, private: bool = False) -> str:
    """Uploads the folder of a run's exported model or adapter, and returns the address of the commit.

    The repository is made if it does not exist. A card is written first if there is none. Files of the repository with the
    same names are replaced, and all others stay. The token is HF_TOKEN, or the one of `hf auth login`.

    Args:
      repository: its name on the hub, user/name.
      private: make the repository private; an existing one stays as it is.

    Raises:
      FileNotFoundError, ValueError: as in `exported` and `check_export`. Nothing is sent then.
      OSError: the hub refuses, or cannot be reached.
    """
    folder = exported(run)
    check_export(folder)
    if not (folder / CARD).exists():
        write_card(run, repository=repository)
    api = HfApi()
    options: dict[str, Any] = dict(folder_path=folder, commit_message=f"Upload {folder.name} by moe_jax")
    try:
        name = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        # Hidden files are not the export's.
        return str(api.upload_folder(repo_id=name, ignore_patterns=[".*"], **options).commit_url)
    except (OSError, ValueError):
        raise
    except Exception as error:
        # Errors of the transport: versions of huggingface_hub have them from different packages.
        raise OSError(f"the upload to {api.endpoint} failed: {error.__cause__ or error}") from error


def check_export(folder: Path) -> None:
    """Checks that all files of an export's weights are there and whole, and that others have an adapter's base.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is cut off, or is no safetensors file; or the base is a folder of this machine.
    """
    names, base, index = {"model.safetensors"}, None, folder / "model.safetensors.index.json"
    if folder.name == ADAPTER_FOLDER:
        names, base = {WEIGHTS_FILE}, read_json(folder / CONFIG_FILE)["base_model_name_or_path"]
    elif index.is_file():
        names = set(read_json(index)["weight_map"].values())
    if base is not None and Path(base).is_absolute():
        raise ValueError(
            f"{folder / CONFIG_FILE} names {base} as the adapter's base, which others do not have; nothing was sent. Write the "
            "base's hub id there, or upload merged weights (moe-jax convert --merge)"
        )
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} is incomplete, and nothing was sent: {', '.join(missing)} is missing")
    for name in sorted(names):
        try:
            with safe_open(folder / name, "np"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged, and nothing was sent: {error}") from error
