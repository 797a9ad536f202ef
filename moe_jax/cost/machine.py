"""Rates of a GPU and its links, the time of a collective over axes of a mesh, and the GPUs that `moe-jax plan` knows by name.

Most figures of `H200` are measurements of a single kernel or collective (see docs/log), or fits to whole layers and losses.
Comments name the two figures that were fitted to whole training steps, and the four that are assumed. Rates of other GPUs are
scaled from the H200's by data sheets.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moe_jax.parallel.choices import MESH_AXES, MeshShape

Axes = tuple[str, ...]


class Fp8Rates(NamedTuple):
    """Measured FLOP/s of each of the experts' FP8 matmuls. A matmul counts the same FLOPs as in bfloat16."""

    gate_up: float
    down: float
    dx: float
    d_act: float


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, in hosts of `gpus_of_host`. Rates are FLOP/s and byte/s of one GPU, times are seconds.

    Rates of links count the bytes that a GPU receives, which equal the bytes that it sends. `between_hosts` is the rate of each
    GPU's own network card, in each direction.
    """

    name: str
    memory: float
    gpus_of_host: int
    hbm: float
    """Bytes read and written in a second."""
    dense_matmul: float
    experts_matmul: float
    """All grouped matmuls except the backward down projection. FLOPs count every row of a tile, filled or not."""
    experts_d_act: float
    """The backward pass of the down projection, fused with the activation's backward pass."""
    experts_sums: float
    """Bytes read and written in a second by the kernels that add the experts' gradients to float32 sums."""
    experts_overhead: float
    """Seconds of an MoE layer's small kernels in a forward pass, for any number of tokens; twice that backward."""
    attention_forward: float
    attention_backward: float
    """FLOPs count five matmuls. The kernels compute two of them twice."""
    attention_backward_wide: float
    """`attention_backward` for keys wider than 128 channels."""
    vocabulary: float
    """The matmuls of the vocabulary's loss, excluding the time to read and write logits and gradients."""
    top_k: float
    """Seconds for each token."""
    sort: float
    """Seconds for each choice: sorted by expert and counted."""
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    ring_hop: float
    """A `ppermute` by NCCL, while a kernel occupies every SM."""
    ring_hop_copied: float
    """A `ppermute` by peer-to-peer copy, which uses no SM (`parallel.collectives.hops.COPIES`)."""
    between_hosts: float
    host_link: float
    """Between a GPU and its host's memory, in one direction."""
    latency: float
    host_latency: float
    """Additional seconds of a collective for each further host that it spans."""
    hidden: float
    """Share of NCCL's time for a gather or sum that is hidden while a layer's computation runs."""
    layer_overhead: float
    """Seconds of a pass over a layer that no other figure accounts for."""
    experts_fp8: Fp8Rates | None = None
    """None: no kernels, and the reference is slower than bfloat16."""


def all_gather_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of an all-gather whose result has `size` bytes on each device.

    Inside a host a GPU receives all parts except its own. Parts from other hosts arrive once at each host; its GPUs in the
    group receive one share each and exchange them.
    """
    return _gather_seconds(machine, machine.all_gather, size, axes, mesh)


def all_to_all_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of an all-to-all: each device sends an equal share of its `size` bytes to every device."""
    devices, inside, hosts = _group(machine.gpus_of_host, axes, mesh)
    within = size * (inside - 1) / devices / machine.all_to_all
    between = size * (devices - inside) / devices / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def reduce_scatter_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of a reduce-scatter of `size` bytes on each device: a reversed all-gather at its own rate."""
    return _gather_seconds(machine, machine.reduce_scatter, size, axes, mesh)


def _gather_seconds(machine: Machine, rate: float, size: float, axes: Axes, mesh: MeshShape) -> float:
    devices, inside, hosts = _group(machine.gpus_of_host, axes, mesh)
    within = size * (devices - 1) / devices / rate
    between = size * (hosts - 1) / hosts / inside / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def all_reduce_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of an all-reduce of arrays of `size` bytes: a reduce-scatter and an all-gather."""
    return reduce_scatter_seconds(machine, size, axes, mesh) + all_gather_seconds(machine, size, axes, mesh)


def ring_hop_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape, *, copied: bool = False) -> float:
    """Returns the seconds to send `size` bytes from each device to its neighbor in a ring; the slowest link decides."""
    devices, _, hosts = _group(machine.gpus_of_host, axes, mesh)
    inside = machine.ring_hop_copied if copied else machine.ring_hop
    rate = inside if hosts == 1 else min(inside, machine.between_hosts)
    return _started(machine, devices, min(hosts, 2), size / rate)


def is_inside_host(machine: Machine, axes: Axes, mesh: MeshShape) -> bool:
    """Returns True if a collective along `axes` stays inside a host."""
    return _group(machine.gpus_of_host, axes, mesh)[2] == 1


@functools.cache
def _group(gpus_of_host: int, axes: Axes, mesh: MeshShape) -> tuple[int, int, float]:
    """Returns the number of devices of a collective along `axes`, how many of them share a host, and the number of hosts.

    Neighbours along the last axis are neighbours in the list of devices, which is ordered by host.
    """
    devices = inside = stride = 1
    for name in reversed(MESH_AXES):
        size = getattr(mesh, name)
        if name in axes:
            devices *= size
            inside *= min(size, max(1, gpus_of_host // stride))
        stride *= size
    return devices, inside, devices / inside


def _started(machine: Machine, devices: int, hosts: float, seconds: float) -> float:
    if devices == 1:
        return 0.0
    return machine.latency + (hosts - 1) * machine.host_latency + seconds


H200 = Machine(
    name="NVIDIA H200",
    # `moe-jax` lets JAX allocate 95 % of 139 GiB.
    memory=0.95 * 139 * 2**30,
    gpus_of_host=8,
    hbm=4.27e12,
    # XLA's matmul at the size of an expert's projection over all rows: 535 to 718 in different sessions under load.
    dense_matmul=650e12,
    # From times of an isolated layer, at 1024 to 65536 tokens of four models.
    experts_matmul=640e12,
    experts_d_act=490e12,
    # With too few tokens to hide it: 2.15 ms for the sums of a layer of Qwen3-30B-A3B (docs/log/kernels.md, "Sums").
    experts_sums=2.25e12,
    experts_overhead=0.16e-3,
    # 128 heads of 192 and 128: 4.58 ms for four sequences of 4096 tokens, 27.2 ms with backward.
    attention_forward=600e12,
    attention_backward=415e12,
    attention_backward_wide=316e12,
    # 26.8 and 107 ms with gradients for 8192 and 32768 tokens of Qwen3-30B-A3B, 73.1 for 8192 of DeepSeek-V3.
    vocabulary=727e12,
    # 0.16 ms for 32768 tokens; 0.19 ms for the argsort and the counts of their 262144 choices.
    top_k=4.9e-9,
    sort=0.72e-9,
    all_gather=315e9,
    reduce_scatter=277e9,
    all_to_all=280e9,
    ring_hop=100e9,
    # 88 us for the 33.5 MB of 8192 tokens of Qwen3-30B-A3B.
    ring_hop_copied=380e9,
    # Assumed: 80 % of a 400 Gb/s card; 16 lanes of PCIe 5; 20 us to begin a collective, 10 us for each further host.
    between_hosts=40e9,
    host_link=50e9,
    latency=20e-6,
    host_latency=10e-6,
    # Fitted to two training steps whose experts are gathered: NCCL's blocks occupy SMs that the overlapping kernels then lack.
    hidden=0.2,
    # Fitted to four training steps; it is 2 % of them (docs/log/cost_model.md).
    layer_overhead=0.1e-3,
    # Under load (docs/log/kernels.md): gate_up with its epilogue and h, d_act from 1.63 ms. Each was measured once.
    experts_fp8=Fp8Rates(gate_up=930e12, down=880e12, dx=954e12, d_act=506e12),
)
"""H200 in hosts of eight, all linked by NVLink with multicast off. Rates of links were measured with four GPUs."""


USABLE = 0.95
"""Share of a GPU's memory that `moe-jax` lets JAX allocate. CUDA and NCCL allocate outside of it."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU's published figures, from which rates are scaled."""

    name: str
    memory: float
    """GiB, as nvidia-smi shows; on a GeForce a desktop uses half a GiB."""
    tflops: float
    """Dense bfloat16 TFLOP/s, accumulated in float32. Data sheets of GPUs since Ampere often print twice that, for sparsity."""
    hbm: float
    """GB/s of the GPU's memory."""
    links: float
    """GB/s between GPUs, both directions together: NVLink, or PCIe where there is none."""
    host_link: float
    """GB/s between GPU and host, one direction: 16 lanes of PCIe."""
    network: float
    """GB/s of the GPU's share of its host's network cards, one direction: a typical host's, since no data sheet has it."""
    is_hopper: bool = False
    """True if the library's own kernels run there; FP8 rates are scaled by the same ratio as bfloat16 on these GPUs."""


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
    # Data sheets of L40S, L4 and A10. Error correction (ECC) uses part of their memory.
    "l40s": DataSheet("NVIDIA L40S", 44, 362, 864, 64, 32, 25),
    "l4": DataSheet("NVIDIA L4", 22.5, 121, 300, 64, 32, 12.5),
    "a10": DataSheet("NVIDIA A10", 22.5, 125, 600, 64, 32, 12.5),
    # NVIDIA's white papers on the architectures Blackwell (RTX), Ada and Ampere GA102.
    "rtx5090": DataSheet("NVIDIA RTX 5090", 31.3, 209.5, 1792, 128, 64, 12.5),
    "rtx4090": DataSheet("NVIDIA RTX 4090", 23.5, 165, 1008, 64, 32, 12.5),
    "rtx3090": DataSheet("NVIDIA RTX 3090", 23.5, 71, 936, 64, 32, 12.5),
}
"""GPUs without measurements."""


def scaled(sheet: DataSheet) -> Machine:
    """Returns the machine with the rates of `H200` times the ratio of the two data sheets.

    Predictions for GPUs other than Hopper are optimistic: the library has no fused attention for them.
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
    # `experts_sums` is not scaled: at half of an H200's memory bandwidth, the kernel is the bound.
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
      ValueError: `gpu` is unknown, `memory` is not above 0, or `memory` is given without a `gpu`.
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
    """Returns the header lines of a plan: the usable memory, and the source of the machine's rates."""
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
