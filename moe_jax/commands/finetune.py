"""`moe-jax finetune`: the fields of `FinetuneSettings` as options, in groups."""

from dataclasses import field, make_dataclass
from typing import Any

from moe_jax.commands.config_file import CONFIG_FIELD
from moe_jax.commands.groups import grouped_fields, summary_of, values_in
from moe_jax.commands.options import LoraOption
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes.finetuning.settings import FinetuneSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "seq_len", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run", "find_learning_rate",
    ),
    "data": (
        "data_format", "learned_answers", "empty_thinking", "tokenizer", "chat_template", "skip_bad_documents", "eval_data",
        "eval_every", "eval_batches", "keep_best", "early_stop",
    ),
    "optimizer": ("learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm"),
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


def settings_of(command: Any) -> FinetuneSettings:
    """Returns the settings given to a `FinetuneCommand`.

    Raises:
      ValueError: `FinetuneSettings` refuses the values.
    """
    return FinetuneSettings(lora=command.lora, mesh=command.mesh, **values_in(command, GROUPS))


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`), or looks for a learning rate (`--find-learning-rate`).

    A run that was told to stop exits with status 143, the status of a program that SIGTERM ended.
    """
    import jax

    from moe_jax.recipes import dry_run, find_learning_rate, finetune, write_report
    from moe_jax.recipes.run.best import told_end, told_stop
    from moe_jax.recipes.run.export import export
    from moe_jax.runtime import processes

    settings = command.settings
    if settings.dry_run:
        dry_run(settings)
        return
    if settings.find_learning_rate:
        find_learning_rate(settings)
        return
    result = finetune(settings)
    first = processes.is_first_process()
    if not result.finished:
        if first:
            print(told_stop("stopped", result.step), flush=True)
        processes.leave(143)
    folder = export(result.model, settings)
    if first:
        what = "Hugging Face checkpoint" if settings.lora is None else "adapter, for PEFT too,"
        print(f"{told_end(settings, result.step, result.model_step, result.stopped_early)}{what} in {folder}")
        devices = jax.devices()
        kinds = f"{len(devices)} x {devices[0].device_kind}"
        print(f"report in {write_report(settings.output, model_step=result.model_step, devices=kinds)}")


FinetuneCommand = make_dataclass(
    "FinetuneCommand",
    [
        *grouped_fields(FinetuneSettings, GROUPS),
        CONFIG_FIELD,
        ("lora", LoraOption, field(default=None)),
        ("mesh", MeshShape, field(default=MeshShape())),
    ],
    frozen=True,
    namespace={"run": _run, "settings": property(settings_of)},
)
FinetuneCommand.__doc__ = summary_of(FinetuneSettings)
