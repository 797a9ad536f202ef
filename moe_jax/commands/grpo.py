"""`moe-jax grpo`: the fields of `GrpoSettings` as options, in groups."""

from typing import Any

from moe_jax.commands.groups import recipe_command, train_and_report
from moe_jax.commands.options import LoraOption
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes.grpo.settings import EngineSizes, GrpoSettings
from moe_jax.reinforcement.settings import LossSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "prompts", "samples", "max_new_tokens", "seed", "checkpoint_every",
        "keep_checkpoints", "dry_run",
    ),
    "rewards": (
        "reward", "reward_weights", "reward_timeout", "on_reward_error", "environment", "max_turns", "tokenizer", "add_tokens",
        "eval_data", "eval_every", "eval_batches",
    ),
    "exactness": ("exact", "on_mismatch"),
    "optimizer": (
        "optimizer", "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm",
    ),
    "memory": ("seq_len", "batch_size", "dtype", "param_dtype", "weights", "moment_dtype"),
    "log": ("log_every", "tensorboard", "log_to"),
}  # fmt: skip
"""The fields of `GrpoSettings` by their group in `--help`, without those that it refuses."""


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`)."""
    from moe_jax.recipes import dry_run, grpo

    try:
        if command.settings.dry_run:
            dry_run(command.settings)
        else:
            train_and_report(command.settings, grpo)
    except RuntimeError as error:
        # A reward that raised, or a failed audit; errors of JAX are subclasses.
        if type(error) is RuntimeError:
            raise ValueError(f"{error}; the same command continues the run") from error
        raise


OTHERS = {
    "grpo": (LossSettings, LossSettings()),
    "engine": (EngineSizes, EngineSizes()),
    "lora": (LoraOption, None),
    "mesh": (MeshShape, MeshShape()),
}
GrpoCommand = recipe_command(GrpoSettings, GROUPS, OTHERS, _run)
