"""What a GPU and its links do in a second, and with it how long a collective over axes of a mesh takes.

Every figure of `H200` is a measurement, most of docs/performance.md, of a kernel or a collective alone, or fitted to whole
layers and losses. The two that were fitted to whole training steps, and the four that are assumed, are named as such.
"""

from dataclasses import dataclass

from moe_jax.parallel.choices import MESH_AXES, MeshShape

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, in hosts of `gpus_of_host`. Rates are FLOP/s and byte/s of one GPU, times are seconds.

    Bytes over links are those that a GPU receives (or sends, which are as many); `between_hosts` holds for each GPU's own
    network card, in each direction.
    """

    name: str
    memory: float
    gpus_of_host: int
    hbm: float
    """Bytes read and written."""
    dense_matmul: float
    experts_matmul: float
    """The grouped matmuls but one, over the rows of their tiles, filled or not."""
    experts_d_act: float
    """The backward pass of the down projection, which does the activation's too."""
    experts_overhead: float
    """Seconds that an MoE layer's small kernels take whatever the tokens, forward; twice backward."""
    attention_forward: float
    attention_backward: float
    """Per FLOP of five matmuls, of which the kernels make two twice."""
    attention_backward_wide: float
    """The same with keys wider than 128 channels."""
    vocabulary: float
    """The matmuls of the vocabulary's loss, without the logits' and the gradient's bytes."""
    top_k: float
    """Seconds a token."""
    sort: float
    """Seconds a choice: sorted by expert and counted."""
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    ring_hop: float
    """A `ppermute` of NCCL's, beside a kernel that takes every core."""
    ring_hop_copied: float
    """A `ppermute` that is a copy from GPU to GPU and takes no core (`parallel.hops.COPIES`)."""
    between_hosts: float
    host_link: float
    """Between a GPU and its host's memory, in one direction."""
    latency: float
    host_latency: float
    """A collective's further seconds for each host that it spans."""
    hidden: float
    """The share of NCCL's time for a gather or sum that takes nothing of the step when a layer's computation runs beside it."""
    layer_overhead: float
    """Seconds that a pass over a layer takes beside all that is counted."""

    @property
    def experts_training(self) -> float:
        """FLOP/s of experts forward and backward: nine matmuls of a size, of which d_act is one."""
        return 9 / (8 / self.experts_matmul + 1 / self.experts_d_act)


def all_gather_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Parts joined to arrays of `size` bytes on each device.

    Inside a host a GPU receives all but its own part; what comes from other hosts the host's GPUs of the group receive once
    together, and pass on.
    """
    devices, inside, hosts = _group(machine, axes, mesh)
    within = size * (devices - 1) / devices / machine.all_gather
    between = size * (hosts - 1) / hosts / inside / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def all_to_all_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Arrays of `size` bytes on each device, of which every device is sent an equal share."""
    devices, inside, hosts = _group(machine, axes, mesh)
    within = size * (inside - 1) / devices / machine.all_to_all
    between = size * (devices - inside) / devices / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def reduce_scatter_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Sums of arrays of `size` bytes on each device, of which each keeps its part."""
    devices, inside, hosts = _group(machine, axes, mesh)
    within = size * (devices - 1) / devices / machine.reduce_scatter
    between = size * (hosts - 1) / hosts / inside / machine.between_hosts
    return _started(machine, devices, hosts, max(within, between))


def all_reduce_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape) -> float:
    """Sums of arrays of `size` bytes: a reduce-scatter and an all-gather."""
    return reduce_scatter_seconds(machine, size, axes, mesh) + all_gather_seconds(machine, size, axes, mesh)


def ring_hop_seconds(machine: Machine, size: float, axes: Axes, mesh: MeshShape, *, copied: bool = False) -> float:
    """`size` bytes from each device to the next of a ring; all wait for the slowest link."""
    devices, _, hosts = _group(machine, axes, mesh)
    inside = machine.ring_hop_copied if copied else machine.ring_hop
    rate = inside if hosts == 1 else min(inside, machine.between_hosts)
    return _started(machine, devices, min(hosts, 2), size / rate)


def _group(machine: Machine, axes: Axes, mesh: MeshShape) -> tuple[int, int, float]:
    """(devices of a group along `axes`, how many of them share a host, over how many hosts they are spread).

    Neighbours along the last axis are neighbours in the list of devices, which goes through one host after the other.
    """
    devices = inside = stride = 1
    for name in reversed(MESH_AXES):
        size = getattr(mesh, name)
        if name in axes:
            devices *= size
            inside *= min(size, max(1, machine.gpus_of_host // stride))
        stride *= size
    return devices, inside, devices / inside


def _started(machine: Machine, devices: int, hosts: float, seconds: float) -> float:
    if devices == 1:
        return 0.0
    return machine.latency + (hosts - 1) * machine.host_latency + seconds


H200 = Machine(
    name="NVIDIA H200",
    # What `moe-jax` lets JAX take: 95 % of 139 GiB.
    memory=0.95 * 139 * 2**30,
    gpus_of_host=8,
    hbm=4.27e12,
    # XLA's, at the size of an expert's projection over all rows: 535 to 718 in different sessions under load.
    dense_matmul=650e12,
    # Of the whole layer's times alone, at 1024 to 65536 tokens of four models.
    experts_matmul=640e12,
    experts_d_act=490e12,
    experts_overhead=0.16e-3,
    # 128 heads of 192 and 128: 4.58 ms for four sequences of 4096, with backward 27.2.
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
    # Assumed: cards of 400 Gb/s, 80 % of it; 16 lanes of PCIe 5; and 20 us to begin a collective, 10 us for each further host.
    between_hosts=40e9,
    host_link=50e9,
    latency=20e-6,
    host_latency=10e-6,
    # Fitted to two training steps whose experts are gathered: NCCL's blocks take cores from the kernels that they run beside.
    hidden=0.2,
    # Fitted to four training steps, of which it is 2 % (docs/scaling.md).
    layer_overhead=0.1e-3,
)
"""Eight to a host, linked all to all by NVLink (rates measured with four), multicast off."""
