"""Loads the Hugging Face tokenizer from a model's folder or from the hub."""

import base64
import copy
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_jax.checkpoint.hf_files import SMALL_FILES, downloaded

RANKS = "tiktoken.model"
"""The file of byte sequences and their ranks that Kimi's tokenizer reads."""
KIMI_SPLITS = "|".join(
    (
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{upper}"
            rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{lower}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for upper, lower in ("*+", "+*")
        ),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pieces of a text in which Kimi K2's and Moonlight's tokenizers look for tokens. Only their Python code has it."""
NUM_RESERVED = 256
"""The number of ids after the ranks for special tokens. Those without a name in tokenizer_config.json are reserved."""


def load_tokenizer(folder_or_hub_id: str | Path):
    """Loads the Hugging Face tokenizer of a checkpoint.

    A repository's Python code is never run. Kimi K2 and Moonlight have no tokenizer.json; their ranks are read here, with the
    same ids as their own code.

    Raises:
      ValueError: there is no tokenizer, or its files cannot be read; the message names the folder or hub id, and the reason.
    """
    # Without torch, transformers advises on import that models are unavailable; tokenizers are all that is used here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder_or_hub_id).expanduser()
    try:
        # transformers would ask the hub for each file separately, and five times each without a network.
        found = folder if folder.is_dir() else downloaded(str(folder_or_hub_id), SMALL_FILES)
    except FileNotFoundError as error:
        raise ValueError(f"no tokenizer can be read: {error}") from error
    where = f"the folder {folder}" if folder.is_dir() else f"{str(folder_or_hub_id)!r} on the hub"
    try:
        code = _code_of(found)
        if code is None:
            # False: else transformers asks on the terminal whether to run a repository's code.
            tokenizer = AutoTokenizer.from_pretrained(str(found), trust_remote_code=False)
        elif (found / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(found))
        elif code in ("tokenization_kimi", "tokenization_moonshot"):
            tokenizer = _read_kimi(found)
        else:
            raise ValueError(
                f"it is the Python code {code}.py, which is not run. Convert it to a tokenizer.json in that folder, or pass a "
                "tokenizer (tokenizer= in Python)"
            )
    except Exception as error:  # JSON files that are not a tokenizer's raise TypeError, KeyError, AttributeError, ...
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        if not any(re.search(r"tok|tek|voc|merges|\.model$", file.name) for file in found.iterdir()):
            reason = "it has no tokenizer files"  # transformers would ask to install packages, on several lines.
        raise ValueError(f"no tokenizer can be read from {where}: {reason}") from error
    # From a config.json alone transformers makes a tokenizer with only its class's special tokens.
    if not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens:
        raise ValueError(f"no tokenizer can be read from {where}: it has no tokenizer files")
    return tokenizer


def with_tokens(tokenizer: Any, tokens: Sequence[str]) -> Any:
    """Returns a copy of the tokenizer in which each of these texts is a token of its own.

    Raises:
      ValueError: the tokenizer has some of the tokens already.
    """
    known = tokenizer.get_vocab().keys()
    if found := [token for token in tokens if token in known]:
        raise ValueError(f"add_tokens: the tokenizer already has {', '.join(map(repr, found))}; leave them out")
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(list(tokens))
    return extended


def beginning(tokenizer: Any) -> list[int]:
    """Returns the special tokens, usually one or none, that the tokenizer adds before a text."""
    plain, whole = (tokenizer("x", add_special_tokens=special)["input_ids"] for special in (False, True))
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def begun(begin: list[int], tokens: list[int]) -> list[int]:
    """Prepends the tokens of `beginning`, unless the text already starts with one of them."""
    return tokens if tokens and tokens[0] in begin else [*begin, *tokens]


def ended(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Appends the eos token, unless the text already ends with it (ignoring white space)."""
    eos = tokenizer.eos_token_id
    if eos in tokens and not tokenizer.decode(tokens[len(tokens) - tokens[::-1].index(eos) :]).strip():
        return tokens
    return [*tokens, eos]


def _code_of(folder: Path) -> str | None:
    """Returns the Python module that holds the tokenizer's class; None for a class of transformers."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    if tokenizer_class_from_name(config.get("tokenizer_class") or "") is not None:
        return None
    classes = (config.get("auto_map") or {}).get("AutoTokenizer") or ()
    names = [name for name in ([classes] if isinstance(classes, str) else classes) if name]
    # On the hub a name may begin with another repository's: "owner/name--module.Class".
    return names[0].rpartition("--")[2].partition(".")[0] if names else None


def _read_kimi(folder: Path):
    """Builds a tokenizer.json from the ranks and special tokens, and loads it with the folder's config and chat template."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            lines = [line.split() for line in Path(tiktoken_url).read_bytes().splitlines() if line]
            return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}

    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    converted = Converter(str(folder / RANKS), KIMI_SPLITS).converted()
    first = converted.get_vocab_size()
    named = {int(number): fields for number, fields in config.pop("added_tokens_decoder", {}).items()}
    if named and not first == min(named) <= max(named) < first + NUM_RESERVED:
        raise ValueError(f"{RANKS} has {first} tokens, and special tokens have the ids {min(named)} to {max(named)}: it is cut")
    for number in range(first, first + NUM_RESERVED):
        fields = named.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        converted.add_tokens([AddedToken(**{"normalized": False, **fields})])
    del config["auto_map"]
    with TemporaryDirectory() as readable:
        converted.save(f"{readable}/tokenizer.json")
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        Path(readable, "tokenizer_config.json").write_text(json.dumps(config))
        for file in folder.glob("chat_template.*"):
            shutil.copy(file, readable)
        tokenizer = AutoTokenizer.from_pretrained(readable)
    tokenizer.name_or_path = str(folder)
    return tokenizer
