"""The files that a run leaves behind: a model, or the adapter of a run that trained one."""

from pathlib import Path
from typing import Protocol

from moe_jax.adapters.save import save_adapter
from moe_jax.adapters.settings import LoraSettings
from moe_jax.adapters.source import ADAPTER_FOLDER, CONFIG_FILE
from moe_jax.checkpoint.folders import check_replaceable
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.lock import output_lock
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.finetuning.settings_file import chosen_template


class ExportedRun(Protocol):
    """The settings of a run, on texts or on preferences, that say what it leaves behind and where."""

    @property
    def model(self) -> str:
        """The checkpoint folder or hub id that the run began with."""

    @property
    def output(self) -> str:
        """The run's folder."""

    @property
    def tokenizer(self) -> str | None:
        """A folder or hub id; None: the model's."""

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters that were trained; None: all parameters."""


class AdaptedRun(Protocol):
    """The settings of a run that say what adapters it trains, beside weights in which form."""

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters; None: all parameters are trained."""

    @property
    def weights(self) -> str:
        """The form of the frozen weights."""


def export(model: Decoder, settings: FinetuneSettings) -> Path:
    """Writes the trained model, or its adapter, into the run's folder, complete or absent; returns its folder there.

    Raises:
      BlockingIOError: another run is under way in the output folder.
    """
    template = None if settings.chat_template is None else chosen_template(Path(settings.output).expanduser())
    return write_trained(model, settings, template)


def write_trained(model: Decoder, settings: ExportedRun, chat_template: str | None = None) -> Path:
    """Does what `export` does for any run; raises as it does."""
    folder = destination(settings)
    with output_lock(folder.parent):
        if settings.lora is None:
            save_pretrained(model, folder, tokenizer_from=settings.tokenizer, chat_template=chat_template)
        else:
            base = None if Path(settings.model).expanduser().is_dir() else settings.model
            save_adapter(model, folder, base=base, tokenizer_from=settings.tokenizer, chat_template=chat_template)
    return folder


def check_destination(settings: ExportedRun) -> None:
    """Raises what `export` would raise of the folder that it writes, so that a run fails before hours of work."""
    check_replaceable(destination(settings), "config.json" if settings.lora is None else CONFIG_FILE)


def destination(settings: ExportedRun) -> Path:
    """Returns the folder in the run's output that gets the trained model, or its adapter."""
    return Path(settings.output).expanduser() / ("model" if settings.lora is None else ADAPTER_FOLDER)
