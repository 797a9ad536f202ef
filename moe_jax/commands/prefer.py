"""`moe-jax prefer`: the fields of `PreferSettings` as options, in groups."""

from dataclasses import field, make_dataclass
from typing import Any

from moe_jax.commands.config_file import CONFIG_FIELD
from moe_jax.commands.groups import grouped_fields, summary_of, values_in
from moe_jax.commands.options import LoraOption
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.preferring.settings import PreferSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "seq_len", "max_length", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run",
    ),
    "data": ("plain_text", "tokenizer", "eval_data", "eval_every", "eval_batches", "keep_best", "early_stop"),
    "optimizer": ("learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm"),
    "memory": ("dtype", "param_dtype", "weights", "precision", "fp8_dense", "remat"),
    "log": ("log_every", "tensorboard", "log_to"),
}  # fmt: skip
"""The fields of `PreferSettings` by their group in `--help`; `preference` and `lora` are groups of their own."""


def settings_of(command: Any) -> PreferSettings:
    """Returns the settings given to a `PreferCommand`.

    Raises:
      ValueError: `PreferSettings` refuses the values.
    """
    return PreferSettings(lora=command.lora, preference=command.preference, **values_in(command, GROUPS))


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`). A run that was told to stop exits with status 143, as in finetune."""
    import jax

    from moe_jax.recipes import prefer, write_report
    from moe_jax.recipes.preferring.dry_run import dry_run
    from moe_jax.recipes.run.best import told_end, told_stop
    from moe_jax.recipes.run.export import export
    from moe_jax.runtime import processes

    settings = command.settings
    if settings.dry_run:
        dry_run(settings)
        return
    result = prefer(settings)
    if not result.finished:
        print(told_stop("stopped", result.step), flush=True)
        processes.leave(143)
    folder = export(result.model, settings)
    what = "Hugging Face checkpoint" if settings.lora is None else "adapter"
    print(f"{told_end(settings, result.step, result.model_step, result.stopped_early)}{what} in {folder}")
    device = f"1 x {jax.devices()[0].device_kind}"
    print(f"report in {write_report(settings.output, model_step=result.model_step, devices=device)}")


PreferCommand = make_dataclass(
    "PreferCommand",
    [
        *grouped_fields(PreferSettings, GROUPS),
        CONFIG_FIELD,
        ("preference", PreferenceSettings, field(default=PreferenceSettings())),
        ("lora", LoraOption, field(default=None)),
    ],
    frozen=True,
    namespace={"run": _run, "settings": property(settings_of)},
)
PreferCommand.__doc__ = summary_of(PreferSettings)
