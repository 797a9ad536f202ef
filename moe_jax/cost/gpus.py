"""The machines that `moe-jax plan` knows by name: the measured H200, and GPUs scaled from it by data sheets."""

from dataclasses import dataclass, replace
from typing import Any

from moe_jax.cost.machine import H200, Machine

USABLE = 0.95
"""Share of a GPU's memory that `moe-jax` lets JAX take."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU's published figures."""

    name: str
    memory: float
    """GiB."""
    tflops: float
    """Dense bfloat16 TFLOP/s."""
    hbm: float
    """GB/s of the GPU's memory."""
    links: float
    """GB/s between GPUs, both directions together."""
    host_link: float
    """GB/s between GPU and host, one direction."""
    network: float
    """GB/s of the GPU's network card, one direction."""
    is_hopper: bool = False
    """True if the GPU has kernels for experts in FP8."""


H200_SHEET = DataSheet("NVIDIA H200", 139, 989, 4800, 900, 64, 50)
SHEETS = {
    "h100": DataSheet("NVIDIA H100 80 GB", 79, 989, 3350, 900, 64, 50, is_hopper=True),
    "a100": DataSheet("NVIDIA A100 80 GB", 79, 312, 2039, 600, 32, 25),
    "a100-40gb": DataSheet("NVIDIA A100 40 GB", 39, 312, 1555, 600, 32, 25),
    "l40s": DataSheet("NVIDIA L40S", 44, 362, 864, 64, 32, 25),
    "rtx4090": DataSheet("NVIDIA RTX 4090", 23.5, 165, 1008, 64, 32, 12.5),
}


def scaled(sheet: DataSheet) -> Machine:
    """Returns the machine with the rates of `H200` times the ratio of the two data sheets.

    Predictions for GPUs before Hopper are optimistic: the library has no fused attention for them.
    """
    compute, hbm = sheet.tflops / H200_SHEET.tflops, sheet.hbm / H200_SHEET.hbm
    links = sheet.links / H200_SHEET.links
    rates = [
        (compute, (
            "dense_matmul",
            "experts_matmul",
            "experts_d_act",
            "attention_forward",
            "attention_backward",
            "attention_backward_wide",
            "vocabulary",
        )),
        (hbm, ("hbm",)),
        (links, ("all_gather", "reduce_scatter", "all_to_all", "ring_hop", "ring_hop_copied")),
        (sheet.host_link / H200_SHEET.host_link, ("host_link",)),
        (sheet.network / H200_SHEET.network, ("between_hosts",)),
        # These two are seconds, of kernels bound by memory.
        (1 / hbm, ("top_k", "sort")),
    ]  # fmt: skip
    # `experts_sums` stays: half of what an H200's memory gives, it is bound by the kernel.
    fields: dict[str, Any] = {name: ratio * getattr(H200, name) for ratio, names in rates for name in names}
    if not sheet.is_hopper:
        fields["experts_fp8"] = None
    return replace(H200, name=sheet.name, memory=USABLE * sheet.memory * 2**30, **fields)


GPUS: dict[str, Machine] = {"h200": H200} | {name: scaled(sheet) for name, sheet in SHEETS.items()}


def machine(gpu: str, *, memory: float | None = None, gpus_of_host: int = 8) -> Machine:
    """Returns the machine named `gpu` in `GPUS`; `memory` (GiB, as nvidia-smi shows) replaces its memory.

    Raises:
      ValueError: `gpu` is unknown, or `memory` is not above 0.
    """
    if gpu.lower() not in GPUS:
        raise ValueError(f"no GPU {gpu!r}; choose one of {', '.join(GPUS)}, or the nearest of them with your GPU's --memory")
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"memory={memory} must be a number of GiB above 0")
    found = replace(GPUS[gpu.lower()], gpus_of_host=gpus_of_host)
    return found if memory is None else replace(found, memory=USABLE * memory * 2**30)
