"""Predicts the time of a training step and the memory of a device, for a model on a mesh. Nothing is measured.

A step is the sum of its parts:

    kernels of one layer    `cost.layer`
    bytes that travel       the layout (`parallel.layout`) and the transport
    rates                   `cost.machine`

Gathers of a layer's parameters, and the sums of their gradients, overlap with the computation of another layer. With
peer-to-peer copies they cost only memory bandwidth. With NCCL the share `Machine.hidden` of their time is free. `cost.travel`
models how much of an exchange and of attention's hops is hidden. Copies to and from host memory are hidden; nothing else
overlaps. docs/log/cost_model.md compares predictions with measurements.

Passes are joined in a pipe (`parallel.pipeline.ticks`), or of micro-batches that overlap. With p ranks, v chunks and m
micro-batches, the last stage runs

    v p ticks                      a chunk forward
    m v + p - 1 - v p ticks        a chunk forward and one backward, in one loop over their layers
    v p ticks                      a chunk backward

m is rounded up to a multiple of p, and layers to one of p v. A hop follows each pass of a tick. Without a pipe p = v = 1.
Two and four GPUs of one host were measured (docs/log/parallel.md, "A pipeline"). They were 2 to 5 % slower than predicted with
remat, 8 to 13 % without. Schedules from a table are priced in lockstep, as they run (`parallel.pipeline.executor`). The model
ignores the cost of branches. ZB-H1 was measured a third slower than its ticks (docs/log/parallel.md, "Schedules from a table").
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_jax.cost.flops import training_flops_per_token
from moe_jax.cost.layer import Passes, experts_sums_seconds, experts_work, layer_seconds, vocabulary_seconds
from moe_jax.cost.machine import H200, Machine, all_to_all_seconds, is_inside_host, ring_hop_seconds
from moe_jax.cost.memory import host_bytes, memory_bytes, num_moments, with_most_kept
from moe_jax.cost.parameters import BYTES, ELEMENT
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.cost.travel import context_seconds, exchange_seconds, gather_seconds, once_a_step_seconds
from moe_jax.layers.matrices import is_orthogonalised
from moe_jax.models.remat import choices_of_parts
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.pipeline.simulator import PassTimes, simulate
from moe_jax.parallel.pipeline.ticks import num_ticks

COMPUTING = ("experts", "projections", "attention", "elementwise", "kept", "overhead")
"""The parts of layers that a GPU computes."""

TRAVEL = ("exchange", "context", "gathers", "hops", "bubble")
"""The parts of layers in which the GPU waits: for data, and at the ends of a pipe."""

HIDDEN_EXCHANGE: dict[Hops, float] = {"nccl": 0.93, "copies": 0.0}
"""Share of an exchange inside a host that the other pass of a joined loop hides.

docs/log/parallel.md, "Micro-batches that overlap", two GPUs: over NCCL (`all_to_all`) a step took 1.075 s in turn and 0.971 s
overlapping, by copies 1.001 and 0.966 s. So 5 of NCCL's additional 74 ms remained. By copies, only kernels became faster.
Exchanges between hosts were not measured, and count in full.
"""


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of one device in one step.

    Attributes:
      seconds: by part; the parts add up to the step.
      hidden_seconds: time of gathers, sums and exchanges that overlaps with computation, and so is not part of the step.
      bytes: by part; the parts add up to the peak.
    """

    step: PlannedStep
    machine: Machine
    seconds: dict[str, float]
    hidden_seconds: float
    bytes: dict[str, float]

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> float:
        """Bytes of a device's memory at the peak."""
        return sum(self.bytes.values())

    @property
    def host_bytes(self) -> float:
        """Host memory in bytes that one device uses for offloaded activations."""
        return host_bytes(self.step)

    @property
    def fits(self) -> bool:
        """True if `memory_bytes` fits in the machine's memory."""
        return self.memory_bytes <= self.machine.memory

    @property
    def tokens_per_second(self) -> float:
        """Training throughput in tokens per second and device."""
        return self.step.rows * self.step.sequence_length / self.step.mesh.size / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of one device (`moe_jax.cost.flops`: recomputation does not count)."""
        frozen = self.step.adapters is not None
        return training_flops_per_token(self.step.config, 2 * self.step.keys, frozen=frozen) * self.tokens_per_second


def predict(step: PlannedStep, machine: Machine = H200) -> Prediction:
    """Returns the predicted cost of one optimizer step.

    Raises:
      ValueError: `hops="copies"` on more devices than one host has, or FP8 on a machine without FP8 kernels.
    """
    if step.precision != "bf16" and machine.experts_fp8 is None:
        raise ValueError(f"precision={step.precision!r} has kernels for Hopper GPUs alone; on {machine.name} take 'bf16'")
    if step.hops == "copies" and step.mesh.size > machine.gpus_of_host:
        raise ValueError(
            f"hops='copies' needs all devices in one process, and a host has {machine.gpus_of_host}; the mesh has "
            f"{step.mesh.size}: use hops='nccl'"
        )
    parts, hidden = (_joined_seconds if step.joins_passes else _seconds_in_turn)(step, machine)
    parts |= {
        "loss": _loss_seconds(step, machine),
        "sums": sums_seconds(step, machine),
        "copies": _copies_seconds(step, machine),
        "optimizer": _optimizer_seconds(step, machine),
        "once a step": once_a_step_seconds(step, machine),
    }
    return Prediction(step, machine, parts, hidden, memory_bytes(step))


def with_fastest_kept(step: PlannedStep, memory: float, machine: Machine = H200) -> PlannedStep:
    """Returns the fastest predicted step with remat whose kept layers and kept parts fit into `memory` bytes.

    Nothing is kept if no choice fits.
    """
    found = [with_most_kept(replace(step, remat=True, keep=keep), memory) for keep in choices_of_parts()]
    fitting = [each for each in found if sum(memory_bytes(each).values()) <= memory]
    return min(fitting, key=lambda each: predict(each, machine).step_seconds) if fitting else found[0]


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in a loop over layers, split into the parts in COMPUTING and TRAVEL."""

    forward: dict[str, float]
    backward: dict[str, float]
    """Includes recomputation with remat."""
    hidden: float
    """Seconds of gathers that overlap with computation; neither pass includes them."""

    def plus(self, other: "StageSeconds") -> "StageSeconds":
        """Returns the seconds of both loops in turn."""
        forward, backward = (
            {name: a[name] + b[name] for name in a} for a, b in ((self.forward, other.forward), (self.backward, other.backward))
        )
        return StageSeconds(forward, backward, self.hidden + other.hidden)

    def times(self, number: float) -> tuple[dict[str, float], float]:
        """Returns the seconds of `number` micro-batches by part (forward and backward), and their hidden seconds."""
        both = {name: number * (seconds + self.backward[name]) for name, seconds in self.forward.items()}
        return both, number * self.hidden

    def computing(self) -> tuple[float, float]:
        """Returns the seconds of computation, forward and backward."""
        forward, backward = (sum(seconds[name] for name in COMPUTING) for seconds in (self.forward, self.backward))
        return forward, backward


def stage_seconds(step: PlannedStep, number: int, layers: int, machine: Machine) -> StageSeconds:
    """Returns the seconds of one forward loop and one backward loop over `layers` layers of stage `number`.

    One iteration computes a layer and gathers the next. Layers that keep their residuals run in a loop of their own.
    """
    num_kept = step.kept_layers(number) if step.remat else 0
    if num_kept:
        found = stage_seconds(replace(step, remat=False, num_kept=0, keep=()), number, num_kept, machine)
        return (
            found.plus(stage_seconds(replace(step, num_kept=0), number, layers - num_kept, machine))
            if layers > num_kept
            else found
        )
    parts = dict.fromkeys((*COMPUTING, *TRAVEL), Passes(0.0, 0.0, 0.0)) | layer_seconds(step, number, machine)
    if step.stages[number].sparse:
        parts["exchange"] = exchange_seconds(step, machine)
    parts["context"] = context_seconds(step, parts["attention"], machine)
    forward = {name: layers * passes.forward for name, passes in parts.items()}
    backward = {name: layers * (passes.backward + (passes.again if step.remat else 0.0)) for name, passes in parts.items()}
    found = StageSeconds(forward, backward, 0.0)
    needs = gather_seconds(step, number, machine)
    for seconds, needed, computing in zip((forward, backward), needs, found.computing(), strict=True):
        hides = (1.0 if step.hops == "copies" else machine.hidden) * min(needed.travel, computing / layers)
        # The gather before the loop overlaps with nothing, and the last iteration's gather is not used.
        seconds["gathers"] = layers * (needed.travel - hides + needed.memory) + needed.travel
        found = found._replace(hidden=found.hidden + layers * hides)
    return found


def _seconds_in_turn(step: PlannedStep, machine: Machine, joined: int | None = None) -> tuple[dict[str, float], float]:
    """Returns the seconds of all layers by part, with micro-batches in turn, and the hidden seconds.

    Args:
      joined: a stage to leave out.
    """
    parts: dict[str, float] = dict.fromkeys((*COMPUTING, *TRAVEL), 0.0)
    hidden = 0.0
    for number, stage in enumerate(step.stages):
        if number != joined:
            one = stage_seconds(step if joined is None else step.outside_pipe, number, stage.num_layers, machine)
            own, of_own = one.times(step.gradient_accumulation)
            parts, hidden = {name: parts[name] + own[name] for name in parts}, hidden + of_own
    return parts, hidden


def _joined_seconds(step: PlannedStep, machine: Machine) -> tuple[dict[str, float], float]:
    """Returns the seconds of all layers in a step with joined passes, by part, and the seconds that are hidden.

    The parts of a layer count a rank's useful work. "bubble" is the rest of the ticks: filling and emptying the pipe, padding
    layers, and micro-batches missing from the last round.

    Schedules from a table cost their lockstep ticks; separating b from W costs nothing but the bubble.

    Stages other than the joined one run micro-batches in turn. With a pipe the ranks share their rows, and their parameters are
    gathered once a step.
    """
    ranks, chunks, micro_batches, ticks = step.mesh.pipe, step.pipe_chunks, step.gradient_accumulation, step.ticks
    number = step.joined_stage
    parts, hidden_outside = _seconds_in_turn(step, machine, joined=number)
    if ranks > 1:
        parts["gathers"] = hidden_outside = 0.0
    chunk = stage_seconds(step, number, step.layers_of_chunk, machine)
    # W, the gradients of weights, is half of the backward matmuls.
    computing = layer_seconds(step, number, machine)
    weights = (
        step.layers_of_chunk * sum(computing[name].backward for name in ("projections", "experts") if name in computing) / 2
    )
    passes: float = num_ticks(ranks, chunks, micro_batches) - chunks * ranks
    of_pair = _hidden_exchange(step, chunk, machine)
    hidden = of_pair * (ticks.pairs if ticks is not None else (passes - chunks * ranks) / passes)
    # Chunks of a rank in all micro-batches, excluding padding layers.
    useful = micro_batches * step.stages[number].num_layers / (ranks * step.layers_of_chunk)
    of_chunk, _ = chunk.times(1)
    of_chunk["exchange"] -= hidden
    parts = {name: seconds + useful * of_chunk[name] for name, seconds in parts.items()}
    parts["bubble"] = (passes - useful) * sum(of_chunk.values())
    if ticks is not None:
        forward, backward = sum(chunk.forward.values()), sum(chunk.backward.values())
        times = PassTimes(forward, backward, weights, forward + backward - of_pair)
        makespan = simulate(ticks.schedule, times, lockstep=True).makespan
        parts["bubble"] = max(0.0, makespan - useful * sum(of_chunk.values()))
        passes = ticks.number * ticks.hops / 2
    if step.pipe_schedule == "uniform-w":
        # The first p - 1 ticks with a backward pass postpone W, and the last p - 1 ticks hide it.
        parts["bubble"] -= (ranks - 1) * weights
    parts["hops"] = _hops_seconds(step, passes, machine)
    return parts, hidden_outside + useful * (chunk.hidden + hidden)


def _hidden_exchange(step: PlannedStep, chunk: StageSeconds, machine: Machine) -> float:
    """Returns the hidden seconds of a chunk's two exchanges in a tick, each at most the computation of the other pass."""
    if not is_inside_host(machine, ("expert",), step.mesh):
        return 0.0
    forward, backward = chunk.computing()
    share = HIDDEN_EXCHANGE[step.hops]
    return min(share * chunk.forward["exchange"], backward) + min(share * chunk.backward["exchange"], forward)


def _hops_seconds(step: PlannedStep, passes: float, machine: Machine) -> float:
    """Returns the seconds of hidden states between ranks: two hops for each pass, plus the hops of embedding and loss.

    Embedded tokens come from all ranks in equal parts, outputs go to all ranks, and their gradients travel back.
    """
    ranks, ticks = step.mesh.pipe, step.ticks
    if ranks == 1:
        return 0.0

    def hop(size: float) -> float:
        return ring_hop_seconds(machine, size, ("pipe",), step.mesh, copied=step.hops == "copies")

    size = ELEMENT * step.tokens * step.config.hidden_size
    moved = 0.0
    if ticks is not None and ticks.copies:
        # Layers come from another rank in the parameters' dtype, and their gradients return in f32.
        layers = sum(p.own_size for p in step.parameters if p.by_layer)
        moved = hop(layers * (BYTES[step.param_dtype] + 4) * ticks.copies)
    return 2 * passes * hop(size) + 4 * step.gradient_accumulation * hop(size * (ranks - 1) / ranks) + moved


def _loss_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of the model's loss and of one loss for each MTP module; the ranks of a pipe share the tokens."""
    config = step.config
    shape = step.tokens / step.mesh.pipe, config.vocab_size, config.hidden_size
    one = vocabulary_seconds(*shape, machine, frozen=step.adapters is not None)
    return step.gradient_accumulation * (1 + len(config.mtp_stages)) * one.total(False)


def _copies_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of the FP8 copies made once a step: weights are read and rounded, then transposed."""
    return (BYTES[step.param_dtype] + 1 + 2) * sum(p.own_size for p in step.parameters if p.fp8 == "once") / machine.hbm


def _optimizer_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of the optimizer, which reads gradients twice, and reads and writes masters and moments.

    One pass over the gradients is for their norm. Muon's products and exchanges are added. No run with Muon was timed.
    """
    of_gradient = 4 if step.accumulates or step.adapters is not None else BYTES[step.param_dtype]
    updated = sum(elements for *_, elements in step.updated)
    traffic = (2 * of_gradient + 2 * 4) * updated + 2 * BYTES[step.moment_dtype] * num_moments(step)
    return traffic / machine.hbm + (_muon_seconds(step, machine) if step.optimizer == "muon" else 0.0)


def _muon_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds to orthogonalise matrices, 5 (4 m^2 n + 2 m^3) FLOPs of each, with m <= n, in TF32.

    Devices that share matrices exchange momenta, then updates.
    """
    flops = 0.0
    for path, shape, elements in step.updated:
        if is_orthogonalised(path, shape):
            m, n = sorted((shape[-2] // (2 if path[-1] == "gate_up_proj" else 1), shape[-1]))
            flops += elements / (m * n) * 5 * (4 * m**2 * n + 2 * m**3)
    shared = [] if step.adapters else [p for p in step.parameters if p.in_stage and p.gather_axes]
    travel = sum(2 * all_to_all_seconds(machine, 4 * p.updated_size, p.gather_axes, step.mesh) for p in shared)
    # TF32 has half the rate of bf16.
    return flops / (machine.dense_matmul / 2) + travel


def sums_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds to accumulate gradients over all micro-batches of a step; 0 without accumulation.

    Sums are read and written. In turn, a micro-batch's own stack of gradients is read too. Joined passes add each layer's
    gradients immediately, and a separate embedding table's once a step. Kernels that add (`Parameter.adds_in_kernel`) hide this
    time under their matmuls.
    """
    if not step.accumulates:
        return 0.0
    if step.adapters is not None:
        return step.gradient_accumulation * 12 * step.trained / machine.hbm
    traffic = 8 if step.joins_passes else 8 + BYTES[step.param_dtype]
    embeds_at_the_end = step.joins_passes and not step.config.tie_word_embeddings
    elements, layers_in_kernel = 0, 0
    for p in step.parameters:
        if p.adds_in_kernel:
            layers_in_kernel = max(layers_in_kernel, p.layers)
        elif not (embeds_at_the_end and p.path[0] == "embed_tokens"):
            elements += p.own_size if p.by_layer or not step.joins_passes else p.used_size
    beyond_matmuls = layers_in_kernel * experts_sums_seconds(experts_work(step), machine) if layers_in_kernel else 0.0
    return step.gradient_accumulation * (traffic * elements / machine.hbm + beyond_matmuls)
