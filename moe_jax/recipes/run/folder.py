"""The folder of a run: its lock, its settings, and the model or adapter that it leaves there."""

import errno
import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jax
import yaml

from moe_jax.adapters.save import save_adapter
from moe_jax.adapters.source import ADAPTER_FOLDER, CONFIG_FILE
from moe_jax.checkpoint.folders import check_replaceable
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.files import write_text
from moe_jax.runtime.processes import is_first_process, texts_of_all

LOCK = ".lock"
"""The file that is locked; the system releases the lock when a program is killed."""

CHAT_TEMPLATE = "chat_template.jinja"
RUN_YAML = "run.yaml"
TOKENIZER = "tokenizer"
"""The folder of a run's tokenizer, if the run added tokens to it."""

_logger = logging.getLogger(__name__)


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Holds `folder` until the block ends; makes the folder if it is not there.

    All processes of a job call this together on a shared file system; the first one holds the lock. On a file system without
    locks a warning is logged and the block runs.

    Raises:
      BlockingIOError: another run holds the folder; the message names its process and host. All processes raise it.
    """
    handle, holder = None, ""
    if is_first_process():
        folder.mkdir(parents=True, exist_ok=True)
        # Not O_TRUNC: it would erase the name of the lock's holder.
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        holder = _locked(handle, folder)
    try:
        if jax.process_count() > 1:
            holder = texts_of_all(holder)[0]
        if holder:
            raise BlockingIOError(
                f"{folder} is in use by another run, {holder}: wait until it ends, or give another output folder"
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _locked(handle: int, folder: Path) -> str:
    """Returns the holder if another process holds the lock; "" if this process holds it now, or if there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return os.read(handle, 1000).decode(errors="replace").strip() or "whose process is not known"
        _logger.warning("%s cannot be locked (%s): nothing keeps two runs from writing there at once", folder, error.strerror)
        return ""
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return ""


def write_settings(
    settings: RunSettings,
    *,
    command: Literal["finetune", "prefer", "grpo"],
    steps: int,
    tokenizer: Any,
    chat_template: str | None = None,
) -> None:
    """Writes settings.json, run.yaml and the chat template, if any, into the output folder; each is complete or absent.

    With added tokens the tokenizer is written too.

    settings.json has all settings, with `epochs` turned into `steps`, the versions of moe_jax and jax, and the date.
    run.yaml has the settings as they were given: the command continues or repeats the run with `--config` and this file.
    """
    output = Path(settings.output).expanduser()
    versions = {"moe_jax": sys.modules["moe_jax"].__version__, "jax": jax.__version__}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    record = asdict(settings) | {"steps": steps, "versions": versions, "started": started}
    if settings.add_tokens:
        tokenizer.save_pretrained(output / TOKENIZER)
    write_text(output / "settings.json", json.dumps(record, indent=2, default=str) + "\n")
    write_text(output / RUN_YAML, _as_yaml(settings, command, versions))
    if chat_template is not None:
        write_text(output / CHAT_TEMPLATE, chat_template)


def _as_yaml(settings: RunSettings, command: str, versions: dict[str, str]) -> str:
    """Returns the settings as YAML, in their own order; without `steps` if `epochs` is set, and without unread ones."""
    # Through JSON: YAML has no tuples.
    values = json.loads(json.dumps(asdict(settings), default=str))
    for name in (*settings.NOT_READ, *(["steps"] if values.get("epochs") is not None else [])):
        del values[name]
    made_by = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = f"# Written by {made_by}. Continue the run, or repeat it with another --output:\n"
    return (
        head + f"#   moe-jax {command} --config {Path(settings.output) / RUN_YAML}\n" + yaml.safe_dump(values, sort_keys=False)
    )


def chosen_template(output: Path) -> str | None:
    """Reads the chat template that the run in the folder uses; None without one."""
    file = output / CHAT_TEMPLATE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def noted_tokenizer(output: Path) -> str | None:
    """Reads the folder or hub id of the run's tokenizer; None if settings.json names no tokenizer."""
    record = noted_settings(output)
    if record.get("add_tokens"):
        return str(output / TOKENIZER)
    return record.get("tokenizer") or record.get("model")


def noted_steps(output: Path, epochs: float) -> int | None:
    """Reads the number of steps that the run in the folder computed for `epochs`; None if it did not."""
    record = noted_settings(output)
    return record.get("steps") if record.get("epochs") == epochs else None


def noted_settings(output: Path) -> dict[str, Any]:
    """Reads settings.json; empty if it cannot be read."""
    try:
        record = json.loads((output / "settings.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def export(model: Decoder, settings: RunSettings) -> Path:
    """Writes the trained model, or its adapter, into the run's folder, complete or absent; returns its folder there.

    The run's chat template, if any, is written too.

    Raises:
      BlockingIOError: another run is using the output folder.
    """
    folder = config_of_export(settings.output, adapter=settings.lora is not None).parent
    template = chosen_template(folder.parent) if getattr(settings, "chat_template", None) else None
    tokenizer = str(folder.parent / TOKENIZER) if settings.add_tokens else settings.tokenizer
    with output_lock(folder.parent):
        if settings.lora is None:
            save_pretrained(model, folder, tokenizer_from=tokenizer, chat_template=template)
        else:
            base = None if Path(settings.model).expanduser().is_dir() else settings.model
            save_adapter(model, folder, base=base, tokenizer_from=tokenizer, chat_template=template)
    return folder


def check_destination(output: str, *, adapter: bool) -> None:
    """Raises `export`'s errors about its folder, so that a run fails before hours of work."""
    config = config_of_export(output, adapter=adapter)
    check_replaceable(config.parent, config.name)


def config_of_export(output: str | Path, *, adapter: bool) -> Path:
    """Returns the path of the config file in the folder that gets the trained model, or its adapter."""
    return Path(output).expanduser() / (f"{ADAPTER_FOLDER}/{CONFIG_FILE}" if adapter else "model/config.json")
