"""The Hugging Face tokenizer that lies beside a model's weights, or on the hub."""

import os
from pathlib import Path
from typing import Any

from moe_jax.checkpoint.hub import SMALL_FILES, downloaded


def load_tokenizer(folder_or_hub_id: str | Path):
    """Loads the Hugging Face tokenizer of a checkpoint.

    Raises:
      ValueError: there is no tokenizer, or its files cannot be read; the message names the folder or hub id, and the reason.
    """
    # Without torch, transformers advises on import that models are unavailable; tokenizers are all that is used here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    folder = Path(folder_or_hub_id).expanduser()
    try:
        # transformers would ask the hub for each file by itself, five times each where there is no network.
        found = folder if folder.is_dir() else downloaded(str(folder_or_hub_id), SMALL_FILES)
    except FileNotFoundError as error:
        raise ValueError(f"no tokenizer can be read: {error}") from error
    where = f"the folder {folder}" if folder.is_dir() else f"{str(folder_or_hub_id)!r} on the hub"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(found))
    except Exception as error:  # files that are JSON, but of no tokenizer, end in a TypeError, KeyError, AttributeError, ...
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"no tokenizer can be read from {where}: {reason}") from error
    # From a config.json alone transformers makes a tokenizer with only its class's special tokens.
    if not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens:
        raise ValueError(f"no tokenizer can be read from {where}: it has no tokenizer files")
    return tokenizer


def beginning(tokenizer: Any) -> list[int]:
    """Returns the special tokens that the tokenizer puts before a text; most tokenizers put one, or none."""
    plain, whole = (tokenizer("x", add_special_tokens=special)["input_ids"] for special in (False, True))
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def begun(begin: list[int], tokens: list[int]) -> list[int]:
    """Returns the tokens of a text behind those of `beginning`, unless the text was written with a special token of these."""
    return tokens if tokens and tokens[0] in begin else [*begin, *tokens]


def ended(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Returns the tokens of a text with the eos token at the end, unless the text has it there, white space aside."""
    eos = tokenizer.eos_token_id
    if eos in tokens and not tokenizer.decode(tokens[len(tokens) - tokens[::-1].index(eos) :]).strip():
        return tokens
    return [*tokens, eos]
