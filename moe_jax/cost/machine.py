"""Rates of a GPU and its links, and the time of a collective over axes of a mesh.

Most figures of `H200` are measurements of a kernel or a collective alone (see docs/performance.md), or fits to whole layers and
losses. Comments name the two figures that were fitted to whole training steps, and the four that are assumed.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.parallel.choices import MESH_AXES, MeshShape

Axes = tuple[str, ...]


class Fp8Rates(NamedTuple):
    """FLOP/s of the experts' products in FP8, counted as those in bfloat16."""

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
    """The backward pass of the down projection, fused with the activation's."""
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
    """The matmuls of the vocabulary's loss, without the time for the bytes of logits and gradient."""
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

    @property
    def experts_training(self) -> float:
        """FLOP/s of experts forward and backward: nine matmuls of equal size. One of them runs at `experts_d_act`."""
        return 9 / (8 / self.experts_matmul + 1 / self.experts_d_act)


def all_gather_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of an all-gather whose result has `size` bytes on each device.

    Inside a host a GPU receives all parts except its own. Parts from other hosts arrive once at each host, whose GPUs of the
    group share them out and pass them on.
    """
    return _gather_seconds(machine, machine.all_gather, size, axes, mesh)


def all_to_all_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of an all-to-all: each device sends an equal share of its `size` bytes to every device."""
    devices, inside, hosts = _group(machine.gpus_of_host, axes, mesh)
    within = size * (inside - 1) / devices / machine.all_to_all
    between = size * (devices - inside) / devices / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def reduce_scatter_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Returns the seconds of a reduce-scatter of arrays of `size` bytes on each device: a gather backwards."""
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
    """Returns the seconds to send `size` bytes from each device to the next of a ring; the slowest link decides."""
    devices, _, hosts = _group(machine.gpus_of_host, axes, mesh)
    inside = machine.ring_hop_copied if copied else machine.ring_hop
    rate = inside if hosts == 1 else min(inside, machine.between_hosts)
    return _started(machine, devices, min(hosts, 2), size / rate)


def is_inside_host(machine: Machine, axes: Axes, mesh: MeshShape) -> bool:
    """Returns True if a collective along `axes` stays inside a host."""
    return _group(machine.gpus_of_host, axes, mesh).hosts == 1


class _Group(NamedTuple):
    """The devices that take part in one collective."""

    devices: int
    inside: int
    """Devices of the group that share a host."""
    hosts: float
    """Hosts over which the group is spread."""


@functools.cache
def _group(gpus_of_host: int, axes: Axes, mesh: MeshShape) -> _Group:
    """Returns the group of a collective along `axes`.

    Neighbours along the last axis are neighbours in the list of devices, which goes through one host after another.
    """
    devices = inside = stride = 1
    for name in reversed(MESH_AXES):
        size = getattr(mesh, name)
        if name in axes:
            devices *= size
            inside *= min(size, max(1, gpus_of_host // stride))
        stride *= size
    return _Group(devices, inside, devices / inside)


def _started(machine: Machine, devices: int, hosts: float, seconds: float) -> float:
    if devices == 1:
        return 0.0
    return machine.latency + (hosts - 1) * machine.host_latency + seconds


H200 = Machine(
    name="NVIDIA H200",
    # `moe-jax` lets JAX take 95 % of 139 GiB.
    memory=0.95 * 139 * 2**30,
    gpus_of_host=8,
    hbm=4.27e12,
    # XLA's matmul at the size of an expert's projection over all rows: 535 to 718 in different sessions under load.
    dense_matmul=650e12,
    # From times of the whole layer alone, at 1024 to 65536 tokens of four models.
    experts_matmul=640e12,
    experts_d_act=490e12,
    # Beside too few tokens to hide it: 2.15 ms for the sums of a layer of Qwen3-30B-A3B (docs/kernels_log.md, "Sums").
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
    # Fitted to two training steps whose experts are gathered: NCCL's blocks take SMs from the kernels that they overlap with.
    hidden=0.2,
    # Fitted to four training steps; it is 2 % of them (docs/scaling.md).
    layer_overhead=0.1e-3,
    # Under load (docs/kernels_log.md): gate_up with its epilogue and h, d_act from 1.63 ms. Each was measured once.
    experts_fp8=Fp8Rates(gate_up=930e12, down=880e12, dx=954e12, d_act=506e12),
)
"""H200 in hosts of eight, all linked by NVLink with multicast off. Rates of links were measured with four GPUs."""
