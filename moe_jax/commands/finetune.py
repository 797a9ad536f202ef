"""`moe-jax finetune`: the fields of `FinetuneSettings` as options, in groups."""

from dataclasses import MISSING, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from moe_jax.commands.options import LoraOption
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes.finetuning.settings import FinetuneSettings

GROUPS = {
    "run": (
        "model", "data", "output", "steps", "epochs", "seq_len", "batch_size", "gradient_accumulation", "seed",
        "checkpoint_every", "keep_checkpoints", "dry_run",
    ),
    "data": (
        "data_format", "learned_answers", "tokenizer", "chat_template", "skip_bad_documents", "eval_data", "eval_every",
        "eval_batches", "keep_best", "early_stop",
    ),
    "optimizer": ("learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "max_grad_norm"),
    "mixture of experts": (
        "aux_loss_coef", "sequence_loss_coef", "z_loss_coef", "expert_bias_update_rate", "mtp_loss_coef",
        "force_balanced_routing",
    ),
    "memory": ("dtype", "param_dtype", "weights", "moment_dtype", "remat", "offload", "shard_optimizer"),
    "pipeline": ("pipe_chunks",),
    "exchange between devices": ("capacity_factor", "hops", "overlap_micro_batches", "shadow_experts", "rebalance_every"),
    "log": ("tensorboard", "log_to", "sample_prompts", "sample_every", "sample_tokens"),
}  # fmt: skip
"""The fields of `FinetuneSettings` by their group in `--help`; `mesh` is a group of its own."""


CONFIG_HELP = (
    "a YAML file of settings, such as the run.yaml in a run's output folder (docs/finetuning.md). Options given beside it win."
)


def settings_of(command: Any) -> FinetuneSettings:
    """Returns the settings given to a `FinetuneCommand`.

    Raises:
      ValueError: `FinetuneSettings` refuses the values.
    """
    groups = (vars(getattr(command, _attribute(name))) for name in GROUPS)
    own = {"lora": command.lora, "mesh": command.mesh}
    return FinetuneSettings(**own, **{name: value for group in groups for name, value in group.items()})


def _run(command: Any) -> None:
    """Trains and exports, or rehearses (`--dry-run`).

    A run that was told to stop exits with status 143, the status of a program that SIGTERM ended.
    """
    import jax

    from moe_jax.recipes import dry_run, finetune, write_report
    from moe_jax.recipes.finetuning.export import export
    from moe_jax.runtime import processes

    settings = command.settings
    if settings.dry_run:
        dry_run(settings)
        return
    result = finetune(settings)
    first = processes.is_first_process()
    if not result.finished:
        if first:
            print(f"stopped after step {result.step} and saved; the same command goes on from there", flush=True)
        processes.leave(143)
    folder = export(result.model, settings)
    if first:
        what = "Hugging Face checkpoint" if settings.lora is None else "adapter, for PEFT too,"
        best = f"the weights of step {result.model_step}, which has the smallest held-out loss: " if settings.keep_best else ""
        early = ", where the held-out loss had stopped falling" if result.stopped_early else ""
        print(f"trained to step {result.step}{early}; {best}{what} in {folder}")
        devices = jax.devices()
        kinds = f"{len(devices)} x {devices[0].device_kind}"
        print(f"report in {write_report(settings.output, model_step=result.model_step, devices=kinds)}")


def _group(title: str) -> Any:
    """Returns a dataclass of the fields of one group: tyro shows each dataclass as one box of the help."""
    defaults, hints = {each.name: each.default for each in fields(FinetuneSettings)}, get_type_hints(FinetuneSettings)
    members: list[Any] = [
        (name, hints[name]) if defaults[name] is MISSING else (name, hints[name], field(default=defaults[name]))
        for name in GROUPS[title]
    ]
    group = make_dataclass(title.title().replace(" ", ""), members, frozen=True)
    # Only the options' descriptions: the class's own would be repeated in every box.
    group.__doc__ = "\n    Attributes:" + _documentation()[1]
    return Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)]


def _documentation() -> tuple[str, str]:
    """Returns the settings' docstring before and after "Attributes:"."""
    summary, _, attributes = str(FinetuneSettings.__doc__).partition("Attributes:")
    return summary, attributes


def _attribute(title: str) -> str:
    return title.replace(" ", "_") + "_"


FinetuneCommand = make_dataclass(
    "FinetuneCommand",
    [
        *((_attribute(title), _group(title)) for title in GROUPS),
        ("config", Annotated[str | None, tyro.conf.arg(help=CONFIG_HELP)], field(default=None)),
        ("lora", LoraOption, field(default=None)),
        ("mesh", MeshShape, field(default=MeshShape())),
    ],
    frozen=True,
    namespace={"run": _run, "settings": property(settings_of)},
)
FinetuneCommand.__doc__ = _documentation()[0].partition("The settings of")[0].rstrip()
