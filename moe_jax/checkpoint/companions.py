"""The files that go with a model's weights: config.json, generation_config.json and the tokenizer's."""

import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from moe_jax.checkpoint.folders import MODEL_FILES
from moe_jax.checkpoint.hf_files import downloaded
from moe_jax.checkpoint.quantised import check_forms, fp8_config
from moe_jax.config import ModelConfig, config_to_dict
from moe_jax.layers.quantised import is_quantised
from moe_jax.models.decoder import Decoder

# Patterns. Python files are copied for programs that run them; this library never runs them.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenization_*.py", "tokenizer_config.json", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Companions:
    """The files saved next to a model's weights (configs, tokenizer), read before any file is replaced.

    Args:
      model: its `source`, if any, provides the generation config and, unless `tokenizer_from` is given, the tokenizer.
      tokenizer_from: the folder or hub id whose tokenizer files to copy.
      chat_template: replaces the tokenizer's own.
      fp8: the weights are written in FP8, and config.json declares it.

    Attributes:
      replaces: patterns of the files that a save replaces. If there are no tokenizer files to write, old ones stay.

    Raises:
      FileNotFoundError: `tokenizer_from` has no tokenizer files, or is neither a folder nor a model on the hub.
      ValueError: the model has adapters, which a checkpoint cannot hold, or quantised weights.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer_from: str | Path | None = None,
        chat_template: str | None = None,
        *,
        fp8: bool = False,
    ):
        if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
            raise ValueError("the model has adapters: merge them first (adapters.merge_adapter), or use adapters.save_adapter")
        if fp8:
            check_forms(nnx.state(model))
        elif is_quantised(nnx.state(model)):
            raise ValueError("the weights are quantised, which files here cannot hold: load the model whole, and save that")
        # transformers 5 looks for dtype, transformers 4 for torch_dtype.
        dtype = model.embed_tokens.weight.dtype.name
        self.config = config_to_dict(model.config) | {"dtype": dtype, "torch_dtype": dtype}
        if fp8:
            self.config["quantization_config"] = fp8_config(model.config)
        self.generation = generation_config(model.source, model.config)
        self.tokenizer = tokenizer_contents(tokenizer_from, model.source, chat_template)
        self.replaces = MODEL_FILES + (TOKENIZER_FILES if self.tokenizer else ())

    def write(self, folder: Path) -> None:
        """Writes the files into `folder`."""
        write_json(folder / "config.json", self.config)
        write_json(folder / "generation_config.json", self.generation)
        for name, content in self.tokenizer.items():
            (folder / name).write_bytes(content)


def write_json(file: Path, fields: dict) -> None:
    """Writes `fields` as indented JSON."""
    file.write_text(json.dumps(fields, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ValueError: the file holds no JSON object; the message names the file.
    """
    return _json_object(file, file.read_bytes())


def generation_config(source: str | Path | None, config: ModelConfig) -> dict[str, Any]:
    """Returns the source folder's generation_config.json, or one with the config's special tokens.

    Raises:
      ValueError: the file holds no JSON object.
    """
    if source is not None and (file := Path(source) / "generation_config.json").is_file():
        return read_json(file)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in ids.items() if value is not None}


def tokenizer_files(tokenizer_from: str | Path | None, source: str | None) -> list[Path]:
    """Returns the tokenizer files to copy; none if the model has no source folder and no folder is given."""
    folder = tokenizer_from if tokenizer_from is not None else source
    if folder is None:
        return []
    path = Path(folder).expanduser()
    if tokenizer_from is not None and not path.is_dir():
        path = downloaded(str(tokenizer_from), TOKENIZER_FILES)
    files = [file for name in TOKENIZER_FILES for file in sorted(path.glob(name)) if file.is_file()]
    if tokenizer_from is not None and not files:
        raise FileNotFoundError(
            f"tokenizer_from={str(folder)!r} has no tokenizer; it must hold one of {', '.join(TOKENIZER_FILES)}"
        )
    return files


def tokenizer_contents(tokenizer_from: str | Path | None, source: str | None, chat_template: str | None) -> dict[str, bytes]:
    """Reads the files of `tokenizer_files`, by name, with `chat_template` in place of the tokenizer's own if it is given."""
    files = {file.name: file.read_bytes() for file in tokenizer_files(tokenizer_from, source)}
    return _with_template(files, chat_template) if files and chat_template is not None else files


def _with_template(files: dict[str, bytes], chat_template: str) -> dict[str, bytes]:
    """Returns the tokenizer's files with only this template: a reader might prefer another one."""
    files = {name: content for name, content in files.items() if name != "chat_template.json"}
    config = _json_object("tokenizer_config.json", files.get("tokenizer_config.json", b"{}"))
    if config.pop("chat_template", None) is not None:
        files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"chat_template.jinja": chat_template.encode()}


def _json_object(file: str | Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{file} must hold a JSON object; mend or remove it: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object; mend or remove it: it holds {content[:40].decode(errors='replace')}")
    return found
