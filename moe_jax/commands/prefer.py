"""`moe-jax prefer`: the fields of `PreferSettings` as options, in groups."""

from typing import Any

from moe_jax.commands.groups import recipe_command, train_and_report
from moe_jax.commands.options import LoraOption
from moe_jax.parallel.choices import MeshShape
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.preferring.settings import PreferSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "seq_len", "max_length", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run",
    ),
    "data": ("plain_text", "tokenizer", "add_tokens", "eval_data", "eval_every", "eval_batches", "keep_best", "early_stop"),
    "optimizer": (
        "optimizer", "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm",
    ),
    "memory": (
        "dtype", "param_dtype", "weights", "precision", "fp8_dense", "moment_dtype", "remat", "offload", "shard_optimizer",
    ),
    "exchange between devices": ("capacity_factor", "hops", "shadow_experts", "tokens_in_fp8"),
    "log": ("log_every", "tensorboard", "log_to"),
}  # fmt: skip
"""The fields of `PreferSettings` by their group in `--help`; `preference`, `lora` and `mesh` are groups of their own."""


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`)."""
    from moe_jax.recipes import dry_run, prefer

    if command.settings.dry_run:
        dry_run(command.settings)
    else:
        train_and_report(command.settings, prefer)


OTHERS = {
    "preference": (PreferenceSettings, PreferenceSettings()),
    "lora": (LoraOption, None),
    "mesh": (MeshShape, MeshShape()),
}
PreferCommand = recipe_command(PreferSettings, GROUPS, OTHERS, _run)
