"""The files that a run leaves behind: a model, or the adapter of a run that trained one."""

from pathlib import Path

from moe_jax.adapters.save import save_adapter
from moe_jax.adapters.source import ADAPTER_FOLDER, CONFIG_FILE
from moe_jax.checkpoint.folders import check_replaceable
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.run.lock import output_lock
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.recipes.run.settings_file import chosen_template


def export(model: Decoder, settings: RunSettings) -> Path:
    """Writes the trained model, or its adapter, into the run's folder, complete or absent; returns its folder there.

    A chat template that the run was given is written too.

    Raises:
      BlockingIOError: another run is under way in the output folder.
    """
    folder = destination(settings)
    template = chosen_template(folder.parent) if getattr(settings, "chat_template", None) else None
    with output_lock(folder.parent):
        if settings.lora is None:
            save_pretrained(model, folder, tokenizer_from=settings.tokenizer, chat_template=template)
        else:
            base = None if Path(settings.model).expanduser().is_dir() else settings.model
            save_adapter(model, folder, base=base, tokenizer_from=settings.tokenizer, chat_template=template)
    return folder


def check_destination(settings: RunSettings) -> None:
    """Raises what `export` would raise of the folder that it writes, so that a run fails before hours of work."""
    check_replaceable(destination(settings), "config.json" if settings.lora is None else CONFIG_FILE)


def destination(settings: RunSettings) -> Path:
    """Returns the folder in the run's output that gets the trained model, or its adapter."""
    return Path(settings.output).expanduser() / ("model" if settings.lora is None else ADAPTER_FOLDER)
