"""The GPUs that `moe-jax plan` knows by name: the measured H200, and GPUs whose rates are scaled from it by data sheets."""

from dataclasses import dataclass, replace
from typing import Any

from moe_jax.cost.machine import H200, Fp8Rates, Machine

USABLE = 0.95
"""Share of a GPU's memory that `moe-jax` lets JAX allocate. CUDA and NCCL allocate theirs outside of it."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU's published figures."""

    name: str
    memory: float
    """GiB, as nvidia-smi shows; a desktop takes half a GiB of a GeForce."""
    tflops: float
    """Dense bfloat16 TFLOP/s, accumulated in float32. Data sheets of GPUs since Ampere often print twice that, for sparsity."""
    hbm: float
    """GB/s of the GPU's memory."""
    links: float
    """GB/s between GPUs, both directions together: NVLink, or PCIe where there is none."""
    host_link: float
    """GB/s between GPU and host, one direction: 16 lanes of PCIe."""
    network: float
    """GB/s of the GPU's share of its host's network cards, one direction: of usual hosts, since no data sheet has it."""
    is_hopper: bool = False
    """True if the library's own kernels run there; FP8's rates are in the same proportion as bfloat16's on these GPUs."""


H200_SHEET = DataSheet("NVIDIA H200", 139, 989, 4800, 900, 64, 50, is_hopper=True)
SHEETS = {
    # DGX B200 data sheet: eight GPUs have 64 TB/s of memory, 72 PFLOP/s in FP8 (sparse: four times bfloat16) and 1440 GB.
    "b200": DataSheet("NVIDIA B200", 179, 2250, 8000, 1800, 64, 50),
    # H100 data sheet, SXM.
    "h100": DataSheet("NVIDIA H100 80 GB", 79, 989, 3350, 900, 64, 50, is_hopper=True),
    # HGX H20 product brief.
    "h20": DataSheet("NVIDIA H20", 95, 148, 4000, 900, 64, 50, is_hopper=True),
    # A100 data sheet, SXM.
    "a100": DataSheet("NVIDIA A100 80 GB", 79, 312, 2039, 600, 32, 25),
    "a100-40gb": DataSheet("NVIDIA A100 40 GB", 39, 312, 1555, 600, 32, 25),
    # Data sheets of L40S, L4 and A10. Their memory corrects errors (ECC), which takes a part of it.
    "l40s": DataSheet("NVIDIA L40S", 44, 362, 864, 64, 32, 25),
    "l4": DataSheet("NVIDIA L4", 22.5, 121, 300, 64, 32, 12.5),
    "a10": DataSheet("NVIDIA A10", 22.5, 125, 600, 64, 32, 12.5),
    # NVIDIA's white papers on the architectures Blackwell (RTX), Ada and Ampere GA102.
    "rtx5090": DataSheet("NVIDIA RTX 5090", 31.3, 209.5, 1792, 128, 64, 12.5),
    "rtx4090": DataSheet("NVIDIA RTX 4090", 23.5, 165, 1008, 64, 32, 12.5),
    "rtx3090": DataSheet("NVIDIA RTX 3090", 23.5, 71, 936, 64, 32, 12.5),
}
"""GPUs on which nothing was measured."""


def scaled(sheet: DataSheet) -> Machine:
    """Returns the machine with the rates of `H200` times the ratio of the two data sheets.

    Predictions for other GPUs than Hopper's are optimistic: the library has no fused attention for them.
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
    fields["experts_fp8"] = None
    if sheet.is_hopper and H200.experts_fp8 is not None:
        fields["experts_fp8"] = Fp8Rates(*(compute * rate for rate in H200.experts_fp8))
    return replace(H200, name=sheet.name, memory=USABLE * sheet.memory * 2**30, **fields)


GPUS: dict[str, Machine] = {"h200": H200} | {name: scaled(sheet) for name, sheet in SHEETS.items()}


def machine(gpu: str | None = None, *, memory: float | None = None, gpus_of_host: int = 8) -> Machine:
    """Returns the machine named `gpu` in `GPUS`, an H200 by default.

    `memory` (GiB, as nvidia-smi shows) replaces the memory of the GPU that is named, and is added to its name.

    Raises:
      ValueError: `gpu` is unknown, `memory` is not above 0, or `memory` is given without a `gpu`: it has no speed.
    """
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"memory={memory} must be a number of GiB above 0")
    if memory is not None and gpu is None:
        sizes = ", ".join(f"{name} ({_whole_memory(found):.3g})" for name, found in GPUS.items())
        raise ValueError(f"--memory {memory:g} alone tells nothing of a GPU's speed: name one with --gpu. In GiB: {sizes}")
    gpu = "h200" if gpu is None else gpu.lower()
    if gpu not in GPUS:
        raise ValueError(f"no GPU {gpu!r}; choose one of {', '.join(GPUS)}, or the nearest of them with your GPU's --memory")
    found = replace(GPUS[gpu], gpus_of_host=gpus_of_host)
    return found if memory is None else replace(found, name=f"{found.name} with {memory:g} GiB", memory=USABLE * memory * 2**30)


def notes(machine: Machine) -> str:
    """Returns the first lines of a plan: how much memory a job may use, and where the machine's rates come from."""
    used, kept = machine.memory / 2**30, 1 - USABLE
    lines = [
        f"A job may use {used:.1f} of a GPU's {_whole_memory(machine):.4g} GiB; {kept:.0%} is kept back for CUDA and NCCL."
    ]
    if machine.hbm != H200.hbm:
        lines.append("Rates are those measured on an H200, scaled by data sheets; nothing was measured on this GPU.")
    if machine.experts_fp8 is None:
        lines.append("It has none of the kernels for Hopper GPUs: a step takes longer than this.")
    return "\n".join(lines)


def _whole_memory(machine: Machine) -> float:
    """Returns the GiB of a GPU, including what a job may not use."""
    return machine.memory / USABLE / 2**30
