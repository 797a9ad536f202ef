"""`moe-jax prefer`: the fields of `PreferSettings` as options, in groups."""

from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from moe_jax.commands.options import LoraOption
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.preferring.settings import PreferSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "seq_len", "max_length", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run",
    ),
    "data": ("plain_text", "tokenizer", "eval_data", "eval_every", "eval_batches"),
    "optimizer": ("learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm"),
    "memory": ("dtype", "param_dtype", "remat"),
    "log": ("tensorboard",),
}  # fmt: skip
"""The fields of `PreferSettings` by their group in `--help`; `preference` and `lora` are groups of their own."""


def settings_of(command: Any) -> PreferSettings:
    """Returns the settings given to a `PreferCommand`.

    Raises:
      ValueError: `PreferSettings` refuses the values.
    """
    groups = (vars(getattr(command, f"{name}_")) for name in GROUPS)
    own = {"lora": command.lora, "preference": command.preference}
    return PreferSettings(**own, **{name: value for group in groups for name, value in group.items()})


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`). A run that was told to stop exits with status 143, as in finetune."""
    from moe_jax.adapters import save_adapter
    from moe_jax.checkpoint.hf_save import save_pretrained
    from moe_jax.recipes import prefer
    from moe_jax.recipes.finetuning.lock import output_lock
    from moe_jax.recipes.preferring.dry_run import dry_run
    from moe_jax.runtime import processes

    settings = command.settings
    if settings.dry_run:
        dry_run(settings)
        return
    result = prefer(settings)
    if not result.finished:
        print(f"stopped after step {result.step} and saved; the same command goes on from there", flush=True)
        processes.leave(143)
    folder = settings.export_folder
    with output_lock(folder.parent):
        if settings.lora is None:
            save_pretrained(result.model, folder, tokenizer_from=settings.tokenizer)
        else:
            base = None if Path(settings.model).expanduser().is_dir() else settings.model
            save_adapter(result.model, folder, base=base, tokenizer_from=settings.tokenizer)
    print(f"trained to step {result.step}; {'Hugging Face checkpoint' if settings.lora is None else 'adapter'} in {folder}")


def _group(title: str) -> Any:
    """Returns a dataclass of the fields of one group: tyro shows each dataclass as one box of the help."""
    defaults, hints = {each.name: each.default for each in fields(PreferSettings)}, get_type_hints(PreferSettings)
    members: list[Any] = [
        (name, hints[name]) if defaults[name] is MISSING else (name, hints[name], field(default=defaults[name]))
        for name in GROUPS[title]
    ]
    group = make_dataclass(f"Prefer{title.title()}", members, frozen=True)
    group.__doc__ = "\n    Attributes:" + str(PreferSettings.__doc__).partition("Attributes:")[2]
    return Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)]


PreferCommand = make_dataclass(
    "PreferCommand",
    [
        *((f"{title}_", _group(title)) for title in GROUPS),
        ("preference", PreferenceSettings, field(default=PreferenceSettings())),
        ("lora", LoraOption, field(default=None)),
    ],
    frozen=True,
    namespace={"run": _run, "settings": property(settings_of)},
)
PreferCommand.__doc__ = str(PreferSettings.__doc__).partition("The settings of")[0].rstrip()
