"""Seconds of layers whose passes are joined: in a pipe (`parallel.pipeline.ticks`), or of micro-batches that overlap.

With p ranks, v chunks and m micro-batches, the last stage takes

    v p ticks                      a chunk forward
    m v + p - 1 - v p ticks        a chunk forward and one backward, in one loop over their layers
    v p ticks                      a chunk backward

m is rounded up to a multiple of p, and layers to one of p v. A hop follows each pass of a tick. Without a pipe p = v = 1.
Two and four GPUs of one host were measured (docs/log/parallel.md, "A pipeline"): with remat 2 to 5 % slower, without 8 to 13 %.
"""

from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.machine import Machine, is_inside_host, ring_hop_seconds
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.cost.schedules import lockstep_seconds, stage_copies, ticks
from moe_jax.cost.stage import COMPUTING, StageSeconds, add_stage, layer_seconds, no_seconds, stage_seconds
from moe_jax.parallel.choices import UNIFORM, Hops
from moe_jax.parallel.pipeline.ticks import num_ticks

HIDDEN_EXCHANGE: dict[Hops, float] = {"nccl": 0.93, "copies": 0.0}
"""Share of an exchange inside a host that hides behind the other pass of a joined loop.

docs/log/parallel.md, "Micro-batches that overlap", two GPUs: over NCCL (`all_to_all`) a step took 1.075 s in turn and 0.971 s
overlapping, by copies 1.001 and 0.966 s. So 5 of the 74 ms that NCCL takes beyond copies stayed. By copies, only kernels became
faster. Exchanges between hosts were not measured, and count in full.
"""


def pipeline_seconds(step: PlannedStep, machine: Machine) -> tuple[dict[str, float], float]:
    """Returns the seconds of all layers in a step with joined passes, by part, and the seconds that are hidden.

    The parts of a layer count what a rank computes of its layers. "bubble" is the rest of the ticks: filling and emptying the
    pipe, places without a layer, and micro-batches that the last round lacks.

    Schedules from a table take their lockstep ticks (`cost.schedules`), with b and W apart at no cost but the bubble.

    Stages beside the joined one run one micro-batch after the other. With a pipe the ranks share their rows, and their
    parameters are gathered once a step.
    """
    ranks, chunks, micro_batches = step.mesh.pipe, step.pipe_chunks, step.gradient_accumulation
    number, from_table = step.joined_stage, step.pipe_schedule not in UNIFORM
    parts, hidden_beside = no_seconds(), 0.0
    for other, stage in enumerate(step.stages):
        if other != number:
            hidden_beside += add_stage(parts, stage_seconds(step.beside_pipe, other, stage.num_layers, machine), micro_batches)
    if ranks > 1:
        parts["gathers"] = hidden_beside = 0.0
    chunk = stage_seconds(step, number, step.layers_of_chunk, machine)
    # W, the gradients of weights, is half of the backward matmuls.
    computing = layer_seconds(step, number, machine)
    matmuls = sum(computing[name].backward for name in ("projections", "experts") if name in computing)
    weights = step.layers_of_chunk * matmuls / 2
    passes: float = num_ticks(ranks, chunks, micro_batches) - chunks * ranks
    of_pair = _hidden_exchange(step, chunk, machine)
    hidden = of_pair * (ticks(step).pairs if from_table else (passes - chunks * ranks) / passes)
    # Chunks of a rank in all micro-batches, without places that have no layer.
    useful = micro_batches * step.stages[number].num_layers / (ranks * step.layers_of_chunk)
    of_chunk = {name: chunk.forward.get(name, 0.0) + chunk.backward.get(name, 0.0) for name in parts}
    of_chunk["exchange"] -= hidden
    for name, seconds in of_chunk.items():
        parts[name] += useful * seconds
    parts["bubble"] = (passes - useful) * sum(of_chunk.values())
    if from_table:
        forward, backward = sum(chunk.forward.values()), sum(chunk.backward.values())
        seconds = lockstep_seconds(step, forward, backward, weights, forward + backward - of_pair)
        parts["bubble"] = max(0.0, seconds - useful * sum(of_chunk.values()))
        passes = ticks(step).number * ticks(step).hops / 2
    if step.pipe_schedule == "uniform-w":
        # The first p - 1 ticks with a backward pass leave W out, and the last p - 1 ticks hide it.
        parts["bubble"] -= (ranks - 1) * weights
    parts["hops"] = _hops_seconds(step, passes, machine)
    return parts, hidden_beside + useful * (chunk.hidden + hidden)


def _hidden_exchange(step: PlannedStep, chunk: StageSeconds, machine: Machine) -> float:
    """Returns the seconds of a chunk's two exchanges that hide in a tick, each at most the computation of the other pass."""
    if not is_inside_host(machine, ("expert",), step.mesh):
        return 0.0
    forward, backward = (sum(seconds.get(name, 0.0) for name in COMPUTING) for seconds in (chunk.forward, chunk.backward))
    exchanges = (seconds.get("exchange", 0.0) for seconds in (chunk.forward, chunk.backward))
    share = HIDDEN_EXCHANGE[step.hops]
    return sum(min(share * each, other) for each, other in zip(exchanges, (backward, forward), strict=True))


def _hops_seconds(step: PlannedStep, passes: float, machine: Machine) -> float:
    """Returns the seconds of hidden states between ranks: two hops for each pass, and those of embedding and loss.

    Embedded tokens and outputs of a micro-batch go from and to all ranks in equal parts, and so do their gradients.
    """
    ranks, copied = step.mesh.pipe, step.hops == "copies"
    if ranks == 1:
        return 0.0
    size = ELEMENT * step.tokens * step.config.hidden_size
    hop = ring_hop_seconds(machine, size, ("pipe",), step.mesh, copied=copied)
    others = ring_hop_seconds(machine, size * (ranks - 1) / ranks, ("pipe",), step.mesh, copied=copied)
    # Layers come from another rank in the parameters' dtype, and their gradients go home in f32.
    layers = sum(p.own_size for p in step.parameters if p.by_layer) * (BYTES[step.param_dtype] + 4) * stage_copies(step)
    moved = ring_hop_seconds(machine, layers, ("pipe",), step.mesh, copied=copied) if layers else 0.0
    return 2 * passes * hop + 4 * step.gradient_accumulation * others + moved
