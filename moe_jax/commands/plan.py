"""`moe-jax plan`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moe_jax import plan
from moe_jax.config import NAMED_CONFIGS, load_config
from moe_jax.parallel.machine import H200


@dataclass(frozen=True)
class Plan:
    """List the meshes on which a training step fits, the fastest first, with predicted time and memory. Needs no GPU.

    moe-jax plan qwen3-30b-a3b --devices 8

    moe-jax plan qwen3-235b-a22b --devices 512 --rows 4096 --moment-dtype bfloat16

    Predictions are for NVIDIA H200; docs/scaling.md says how far they are from what was measured.

    Args:
      config: a published shape (qwen3-30b-a3b, ...) or a folder with a config.json.
      devices: GPUs in all.
      hosts_of: GPUs of one host.
      rows: sequences of one optimizer step over all devices. Default: 32768 tokens a device.
      sequence_length: tokens of each.
      keys_per_token: how many a token sees on average; fewer than half a row where documents are packed.
      remat: whether layers are computed again in the backward pass; by default both are tried, and `--offload` where it helps.
      param_dtype: as in `moe-jax finetune`.
      moment_dtype: as in `moe-jax finetune`.
      expert_load_imbalance: the busiest device's choices over the mean.
      context_method: how attention over a split sequence is computed (`moe-jax finetune` takes the ring).
      hops: as in `moe-jax finetune`. Default: copies where all devices are of one host, whose GPUs one process can have.
      capacity_factor: as in `moe-jax finetune`.
      limit: how many meshes to list.
    """

    config: tyro.conf.Positional[str]
    devices: int
    hosts_of: int = 8
    rows: Annotated[int | None, tyro.conf.arg(aliases=["--batch-size"])] = None
    sequence_length: Annotated[int, tyro.conf.arg(aliases=["--seq-len"])] = 4096
    keys_per_token: float | None = None
    remat: Literal["no", "yes", "offload"] | None = None
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    moment_dtype: Literal["bfloat16", "float32"] = "float32"
    expert_load_imbalance: float = 1.0
    context_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    hops: Literal["nccl", "copies"] | None = None
    capacity_factor: float = 1.25
    limit: int = 10

    def run(self) -> None:
        """Prints the table."""
        if self.config not in NAMED_CONFIGS and not Path(self.config).is_dir():
            names = ", ".join(NAMED_CONFIGS)
            raise ValueError(f"no config {self.config!r}; give a folder with a config.json, or one of {names}")
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1; got {self.limit}")
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1; got {self.sequence_length}")
        config = NAMED_CONFIGS[self.config] if self.config in NAMED_CONFIGS else load_config(self.config)
        rows = max(1, self.devices * 32768 // self.sequence_length) if self.rows is None else self.rows
        predictions = plan.plan(
            config,
            self.devices,
            rows=rows,
            sequence_length=self.sequence_length,
            remat=None if self.remat is None else plan.REMAT[self.remat],
            machine=replace(H200, gpus_of_host=self.hosts_of),
            param_dtype=self.param_dtype,
            moment_dtype=self.moment_dtype,
            keys_per_token=self.keys_per_token,
            expert_load_imbalance=self.expert_load_imbalance,
            context_method=self.context_method,
            hops=self.hops or ("copies" if self.devices <= self.hosts_of else "nccl"),
            capacity_factor=self.capacity_factor,
        )
        hosts = f"{self.devices} x {H200.name} in hosts of {self.hosts_of}"
        print(f"{self.config}, {hosts}, {rows} x {self.sequence_length} tokens a step; predicted, not measured")
        print(plan.format_plan(predictions, self.limit))
