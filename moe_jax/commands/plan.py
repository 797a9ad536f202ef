"""`moe-jax plan`: predicts time and memory of a training step on every mesh."""

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moe_jax.adapters.settings import LoraSettings
from moe_jax.commands.options import LoraOption, config_of, options_of_lora
from moe_jax.models.precision import PrecisionName, Weights
from moe_jax.parallel.choices import MeshShape, OptimizerName, PipeSchedule
from moe_jax.recipes.run.settings import lora_problems, precision_problems, weights_problems

OF_STEP = (
    "optimizer", "moment_dtype", "keys_per_token", "expert_load_imbalance", "context_method", "capacity_factor",
    "tokens_in_fp8", "shard_optimizer", "pipe_schedule", "precision",
)  # fmt: skip
"""The options that are fields of `cost.PlannedStep`."""

if TYPE_CHECKING:
    from moe_jax.adapters.add import PlannedLora
    from moe_jax.cost.machine import Machine
    from moe_jax.cost.step import Prediction


@dataclass(frozen=True)
class PlanCommand:
    """List the meshes on which a training step fits, the fastest first, with predicted time and memory. Needs no GPU.

    moe-jax plan qwen3-30b-a3b --devices 8

    moe-jax plan qwen3-235b-a22b --devices 512 --rows 4096 --moment-dtype bfloat16

    moe-jax plan qwen3-0.6b --devices 1 --gpu rtx4090

    moe-jax plan qwen3-30b-a3b --devices 1 --lora.rank 32

    moe-jax plan qwen3-30b-a3b --devices 4 --answers 1024 --new-tokens 1848 --moment-dtype bfloat16 --param-dtype bfloat16

    docs/log/cost_model.md compares predictions for H200s with measurements. Rates of other GPUs are scaled from the H200's by
    data sheets; none was measured. Exit status: 0 if a mesh fits, 1 if none does, 2 for bad input.

    Args:
      config: a published shape (qwen3-30b-a3b), a folder with a config.json, or a hub id (Qwen/Qwen3-30B-A3B).
      devices: total number of GPUs.
      gpu: b200, h200, h100, h20, a100, a100-40gb, l40s, l4, a10, rtx5090, rtx4090 or rtx3090. Default: h200.
      memory: GiB of one GPU, as nvidia-smi shows, if `--gpu` names another size. Default: the memory of `--gpu`.
      hosts_of: GPUs of one host.
      rows: sequences of one optimizer step over all devices. Default: 32768 tokens for each device.
      sequence_length: tokens of each sequence.
      keys_per_token: mean number of keys that a token attends to; with packed documents less than half a row.
      remat: recompute layers in the backward pass: no, yes, all but a number of last layers, or offload (yes, with layers'
        inputs in host memory). A number can be followed by parts that the other layers keep, as in `moe-jax finetune`. Default:
        all but as many as fit, and offload where yes does not fit. In a pipe no or yes.
      lora: as in `moe-jax finetune`. The predicted time of adapters is the time to read and write their rows.
      weights: as in `moe-jax finetune`. "as stored" counts FP8 in blocks.
      precision: as in `moe-jax finetune`, for Hopper GPUs. Kernels were measured, steps were not.
      param_dtype: as in `moe-jax finetune`.
      optimizer: as in `moe-jax finetune`. Muon's time is predicted and was never measured.
      moment_dtype: as in `moe-jax finetune`.
      expert_load_imbalance: choices computed by the busiest device, over the mean of all devices.
      context_method: how attention is computed over a split sequence (`moe-jax finetune` uses the ring).
      hops: as in `moe-jax finetune`. Default: copies if one host has all devices, since one process can use them; else nccl.
      capacity_factor: as in `moe-jax finetune`.
      tokens_in_fp8: as in `moe-jax finetune`, on meshes with several devices along expert.
      shard_optimizer: as in `moe-jax finetune`, on meshes with several devices along data.
      pipe_schedule: as in `moe-jax finetune`, on meshes with a pipe.
      answers: plan steps of `moe-jax grpo` that draw this number of answers, and learn from them in full rows. All layers are
        recomputed then.
      prompt_tokens, new_tokens: mean lengths of prompts and answers; with `--answers`.
      limit: maximum number of meshes to list.
      sbatch: a file for a Slurm batch script that trains on the fastest mesh.
    """

    config: tyro.conf.Positional[str]
    devices: int
    gpu: str | None = None
    memory: float | None = None
    hosts_of: int = 8
    rows: Annotated[int | None, tyro.conf.arg(aliases=["--batch-size"])] = None
    sequence_length: Annotated[int, tyro.conf.arg(aliases=["--seq-len"])] = 4096
    keys_per_token: float | None = None
    remat: str | None = None
    lora: LoraOption = None
    weights: Weights = "whole"
    precision: PrecisionName = "bf16"
    param_dtype: Literal["bfloat16", "float32"] | None = None
    optimizer: OptimizerName = "adamw"
    moment_dtype: Literal["bfloat16", "float32"] = "float32"
    expert_load_imbalance: float = 1.0
    context_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    hops: Literal["nccl", "copies"] | None = None
    capacity_factor: float = 1.25
    tokens_in_fp8: bool = False
    shard_optimizer: bool = False
    pipe_schedule: PipeSchedule = "uniform"
    answers: int | None = None
    prompt_tokens: int = 200
    new_tokens: int = 1024
    limit: int = 10
    sbatch: str | None = None

    def run(self) -> None:
        """Prints the table, and writes the batch script if asked.

        Raises:
          SystemExit: with status 1, after the table, if nothing fits.
          ValueError: an option has a wrong value, or the options contradict each other.
        """
        from moe_jax.cost.machine import machine, notes
        from moe_jax.cost.plan_table import format_plan, write_batch_script

        if self.lora is not None:
            print(self._planned_lora().summary)
        problems = lora_problems(self.lora, {"data": self.devices}, self.precision)
        problems += weights_problems(self.weights, self.lora)
        of_weights, in_fp8 = (self.pipe_schedule, self.lora, self.weights), self.tokens_in_fp8
        if problems := problems + precision_problems(self.precision, "bfloat16", *of_weights, tokens_in_fp8=in_fp8):
            raise ValueError("; ".join(problems))
        if self.optimizer == "adafactor" and self.moment_dtype != "float32":
            raise ValueError(f"--moment-dtype {self.moment_dtype} is not supported by --optimizer adafactor")
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1; got {self.limit}")
        if self.sequence_length < 2:
            raise ValueError(f"--seq-len must be at least 2, as in `moe-jax finetune`; got {self.sequence_length}")
        found = machine(self.gpu, memory=self.memory, gpus_of_host=self.hosts_of)
        rows = max(1, self.devices * 32768 // self.sequence_length) if self.rows is None else self.rows
        if self.answers is not None:
            self._plan_rollouts(found)
            return
        predictions = self._predictions(found, rows)
        hosts = f" in hosts of {self.hosts_of}" if self.devices > self.hosts_of else ""
        step = f"{rows} x {self.sequence_length} tokens a step"
        print(f"{self.config}, {self.devices} x {found.name}{hosts}, {step}; predicted, not measured")
        print(notes(found))
        print(format_plan(predictions, self.limit))
        best = next((prediction for prediction in predictions if prediction.fits), None)
        if self.sbatch is not None:
            if best is None:
                raise ValueError(f"--sbatch {self.sbatch}: nothing fits, so there is no run to write a script for")
            write_batch_script(Path(self.sbatch), best.step, self.hosts_of)
            print(f"wrote {self.sbatch}; start it with: sbatch {self.sbatch} --model ... --data ... --output ...")
        if best is None:
            for smaller in self._smaller():
                # Adapters may have no mesh for these rows, which is an error.
                with contextlib.suppress(ValueError):
                    if any(prediction.fits for prediction in smaller._predictions(found, rows)):
                        print(f"Adapters (LoRA) fit, with {smaller._options_of_adapters()}.")
                        break
            raise SystemExit(1)

    def _plan_rollouts(self, machine: "Machine") -> None:
        """Prints the meshes of `moe-jax grpo`, over data and fsdp, those that fit first."""
        from moe_jax.cost.plan_table import rollout_table
        from moe_jax.cost.rollout import PlannedRollout, predict_rollout, rows_of

        assert self.answers is not None
        if min(self.answers, self.prompt_tokens, self.new_tokens) < 1:
            raise ValueError("--answers, --prompt-tokens and --new-tokens must be at least 1")
        rollout = PlannedRollout(self.answers, 8, self.prompt_tokens, self.new_tokens, self.devices)
        rows = rows_of(rollout, self.sequence_length)
        meshes = [each for each in replace(self, remat="yes")._predictions(machine, rows) if _is_of_grpo(each.step.mesh)]
        found = [predict_rollout(rollout, each) for each in meshes]
        found.sort(key=lambda each: (not each.fits, sum(each.seconds.values())))
        answers = f"{self.answers} answers of {self.new_tokens} tokens to prompts of {self.prompt_tokens}"
        step = f"{answers}, in rows of {self.sequence_length}"
        print(f"{self.config}, {self.devices} x {machine.name}, {step}; predicted, not measured")
        print("\n".join(rollout_table(found[: self.limit])))
        if not found[0].fits:
            raise SystemExit(1)

    def _predictions(self, machine: "Machine", rows: int) -> "list[Prediction]":
        from moe_jax.cost.plan import REMAT, plan
        from moe_jax.cost.planned_step import PlannedAdapters

        config, adapters = config_of(self.config), None
        if self.lora is not None:
            config, planned = config.without_mtp(), self._planned_lora()
            options = self._options_of_adapters()
            trained = self.lora.targets or ("experts",)
            adapters = PlannedAdapters(
                planned.summary.parameters, planned.moved_elements, options, self.weights, "experts" in trained, planned.factors
            )
        return plan(
            config,
            self.devices,
            rows=rows,
            sequence_length=self.sequence_length,
            remat=None if self.remat is None else REMAT.get(self.remat, self.remat),
            machine=machine,
            param_dtype=self.param_dtype or ("float32" if self.lora is None else "bfloat16"),
            hops=self.hops or ("copies" if self.devices <= self.hosts_of else "nccl"),
            **{name: getattr(self, name) for name in OF_STEP},
            adapters=adapters,
        )

    def _planned_lora(self) -> "PlannedLora":
        from moe_jax.adapters.add import planned_lora

        assert self.lora is not None
        return planned_lora(config_of(self.config).without_mtp(), self.lora, in_fp8=self.precision != "bf16")

    def _options_of_adapters(self) -> str:
        assert self.lora is not None
        return options_of_lora(self.lora) + ("" if self.weights == "whole" else f" --weights {shlex.quote(self.weights)}")

    def _smaller(self) -> "list[PlanCommand]":
        """Returns plans that need less memory: adapters, and adapters on weights in nf4.

        With adapters, experts that multiply in FP8 have only FP8 weights, and need one device.
        """
        if self.weights != "whole":
            return []
        forms: list[Weights] = ["whole", "nf4"] if self.lora is None else ["nf4"]
        if self.precision != "bf16":
            forms = ["fp8"] if self.devices == 1 else []
        loras = [LoraSettings(rank=rank) for rank in (32, 16, 8)] if self.lora is None else [self.lora]
        changes: dict[str, Any] = dict(param_dtype=None, shard_optimizer=False)
        return [replace(self, lora=lora, weights=form, **changes) for form in forms for lora in loras]


def _is_of_grpo(mesh: MeshShape) -> bool:
    return mesh.pipe == mesh.expert == mesh.context == 1
