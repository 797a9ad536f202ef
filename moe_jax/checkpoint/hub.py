"""Files of a model on the Hugging Face hub, in a local folder."""

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError


def downloaded(hub_id: str, patterns: Sequence[str]) -> Path:
    """The folder with those of the model's files, subfolders left out, that match a pattern; downloaded if they are not here.

    Raises:
      FileNotFoundError: there is no such model on the hub, or the hub cannot be reached.
    """
    wanted = f"{hub_id!r} is neither a folder with a checkpoint nor a model on the Hugging Face hub"
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise FileNotFoundError(wanted) from error
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{wanted} that can be reached: {error}") from error
