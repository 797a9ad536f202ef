"""Downloads files of a model on the Hugging Face hub into a local folder."""

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

SMALL_FILES = ("*.json", "tokenizer*", "tokenization_*.py", "*.model", "vocab.*", "merges.txt", "*.jinja")
"""The files that describe a model and its tokenizer: all files except the weights."""


def downloaded(hub_id: str, patterns: Sequence[str]) -> Path:
    """Returns the folder with the model's files that match a pattern, without subfolders; downloads missing files.

    The hub is asked once for a list of all files; an unknown id or a missing network raises there, without retries.

    Raises:
      FileNotFoundError: there is no such model on the hub, it is not open to this user, or the hub cannot be reached.
    """
    wanted = f"{hub_id!r} is neither a folder with a checkpoint nor a model on the Hugging Face hub"
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise FileNotFoundError(wanted) from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{hub_id!r} is a model whose terms must be accepted on https://huggingface.co/{hub_id}; then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{wanted} (a private one needs `hf auth login` or HF_TOKEN)") from error
    except (HfHubHTTPError, OSError) as error:
        # The first line of the client's message gives the reason; its further lines are guesses.
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"{wanted} that can be reached: {reason}") from error
