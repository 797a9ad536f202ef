"""`moe-jax finetune`: the fields of `FinetuneSettings` as options, in groups."""

from typing import Any

from moe_jax.commands.groups import recipe_command, train_and_report
from moe_jax.commands.options import LoraOption
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes.finetuning.settings import FinetuneSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "seq_len", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run", "find_learning_rate",
    ),
    "data": (
        "data_format", "learned_answers", "empty_thinking", "tokenizer", "add_tokens", "chat_template", "skip_bad_documents",
        "eval_data", "eval_every", "eval_batches", "keep_best", "early_stop",
    ),
    "optimizer": (
        "optimizer", "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm",
    ),
    "mixture of experts": (
        "aux_loss_coef", "sequence_loss_coef", "z_loss_coef", "expert_bias_update_rate", "mtp_loss_coef",
        "force_balanced_routing",
    ),
    "memory": (
        "dtype", "param_dtype", "weights", "precision", "fp8_dense", "moment_dtype", "remat", "offload", "shard_optimizer",
    ),
    "pipeline": ("pipe_chunks", "pipe_schedule"),
    "exchange between devices": (
        "capacity_factor", "hops", "overlap_micro_batches", "shadow_experts", "tokens_in_fp8", "rebalance_every",
    ),
    "log": ("log_every", "tensorboard", "log_to", "sample_prompts", "sample_every", "sample_tokens"),
}  # fmt: skip
"""The fields of `FinetuneSettings` by their group in `--help`; `mesh` is a group of its own."""


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`), or looks for a learning rate (`--find-learning-rate`)."""
    from moe_jax.recipes import dry_run, find_learning_rate, finetune

    settings = command.settings
    if settings.dry_run:
        dry_run(settings)
    elif settings.find_learning_rate:
        find_learning_rate(settings)
    else:
        train_and_report(settings, finetune)


OTHERS = {"lora": (LoraOption, None), "mesh": (MeshShape, MeshShape())}
FinetuneCommand = recipe_command(FinetuneSettings, GROUPS, OTHERS, _run)
