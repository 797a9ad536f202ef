"""Seconds of the layers of one stage: what a device computes, and what travels beside."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_jax.config import Stage
from moe_jax.cost.attention import attention_seconds, moved_elements
from moe_jax.cost.flops import attention_matrices
from moe_jax.cost.layer import ExpertsWork, Passes, elementwise_seconds, experts_seconds, matmul_seconds, router_seconds
from moe_jax.cost.machine import Machine
from moe_jax.cost.memory import kept_by_layer
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.cost.quantised import quantised_layer, rounding_seconds
from moe_jax.cost.travel import context_seconds, exchange_seconds, gather_seconds

COMPUTING = ("experts", "projections", "attention", "elementwise", "kept", "overhead")
"""The parts of layers that a GPU computes."""

TRAVEL = ("exchange", "context", "gathers", "hops", "bubble")
"""The parts of layers in which it waits: for data, and at the ends of a pipe."""


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in a loop over layers, by part."""

    forward: dict[str, float]
    backward: dict[str, float]
    """With remat, recomputation too."""
    hidden: float
    """Seconds of gathers that overlap with computation, and are in neither pass."""


def no_seconds() -> dict[str, float]:
    """Returns zero seconds for each part."""
    return dict.fromkeys((*COMPUTING, *TRAVEL), 0.0)


def add_stage(parts: dict[str, float], stage: StageSeconds, micro_batches: int) -> float:
    """Adds the seconds of `micro_batches` micro-batches of a stage to all parts; returns those that are hidden."""
    for name in parts:
        parts[name] += micro_batches * (stage.forward.get(name, 0.0) + stage.backward.get(name, 0.0))
    return micro_batches * stage.hidden


def stage_seconds(step: PlannedStep, number: int, layers: int, machine: Machine) -> StageSeconds:
    """Returns the seconds of one loop forward and one backward over `layers` layers of stage `number`.

    One iteration computes a layer and gathers the next.
    """
    stage, again = step.stages[number], bool(step.remat)
    computing = layer_seconds(step, number, machine)
    parts = dict(computing)
    if stage.sparse:
        parts["exchange"] = exchange_seconds(step, machine)
    parts["context"] = context_seconds(step, computing["attention"], machine)
    forward = {name: layers * passes.forward for name, passes in parts.items()}
    backward = {name: layers * (passes.backward + (passes.again if again else 0.0)) for name, passes in parts.items()}
    hidden = 0.0
    for seconds, needed in zip((forward, backward), gather_seconds(step, number, machine), strict=True):
        beside = sum(seconds.get(name, 0.0) for name in COMPUTING) / layers
        hides = (1.0 if step.hops == "copies" else machine.hidden) * min(needed.travel, beside)
        # The gather before the loop overlaps with nothing, and the last iteration's gather is not used.
        seconds["gathers"] = layers * (needed.travel - hides + needed.memory) + needed.travel
        hidden += layers * hides
    return StageSeconds(forward, backward, hidden)


def layer_seconds(step: PlannedStep, number: int, machine: Machine) -> dict[str, Passes]:
    """Returns the seconds that a device computes in one layer of stage `number`, by part."""
    config, tokens, stage = step.config, step.tokens, step.stages[number]
    own = step.parameters_of_stages[number]
    attended = step.attended[stage.first_layer : stage.first_layer + stage.num_layers]
    hidden, dense_inter = config.hidden_size, config.intermediate_size
    if stage.sparse:
        dense_inter = step.experts.shared_intermediate_size
    weights = attention_matrices(config) + 3 * hidden * dense_inter
    # Two norms and two sums; the activation of a dense block; with shared experts the sum of both outputs.
    elements = (10 + (3 if stage.sparse and dense_inter else 0)) * hidden + moved_elements(config) + 3 * dense_inter
    if step.is_module(stage):
        weights += 2 * hidden * hidden
        # Three more norms; the outputs of two are concatenated.
        elements += 8 * hidden
    frozen = step.adapters is not None
    parts = {
        "projections": matmul_seconds(tokens, weights, machine, frozen=frozen),
        "attention": attention_seconds(tokens, sum(attended) / len(attended), config, machine),
        "elementwise": elementwise_seconds(tokens, elements, machine),
        "overhead": Passes(*(machine.layer_overhead,) * 3),
    }
    if step.param_dtype == "float32":
        # Every pass casts its parameters: 4 bytes read and 2 written.
        cast = 6 * sum(p.own_size / p.layers for p in own) / machine.hbm
        parts["elementwise"] = parts["elementwise"].plus(Passes(cast, cast, cast))
    if step.adapters is not None:
        # Passes over rows of their own, which compute little beside what they read and write.
        moved = elementwise_seconds(tokens, step.adapters.moved_elements / config.num_hidden_layers, machine)
        made = sum(quantised_layer(step, number)) / machine.hbm
        parts["elementwise"] = parts["elementwise"].plus(moved, Passes(made, 0.0, made))
    if stage.sparse:
        parts["experts"] = _sparse_seconds(step, machine)
        parts["elementwise"] = parts["elementwise"].plus(rounding_seconds(step, number, machine))
    return parts | {"kept": _keeping_seconds(step, stage, parts.values(), machine)}


def _keeping_seconds(step: PlannedStep, stage: Stage, computing: Iterable[Passes], machine: Machine) -> Passes:
    """Returns the seconds to copy a layer's residuals into the stack of all layers (`layers/passes.py`) and out of it.

    Copies to and from host memory overlap with the layer's computation; only the excess counts. A pipe copies the layers of a
    chunk back before it computes, beside the loss of some ticks: these copies count in full.
    """
    size = kept_by_layer(step, stage)
    if step.remat != "offload":
        copy = 2 * size / machine.hbm
        return Passes(copy, 0.0, copy)
    copy = size / machine.host_link
    forward, again, backward = (sum(seconds) for seconds in zip(*computing, strict=True))
    hidden = 0.0 if step.offloads_slots else again + backward
    return Passes(max(0.0, copy - forward), 0.0, max(0.0, copy - hidden))


def _sparse_seconds(step: PlannedStep, machine: Machine) -> Passes:
    experts = step.experts
    grouped = experts.num_groups > 1
    router = router_seconds(step.tokens, step.config.hidden_size, experts.num_experts, machine, grouped=grouped)
    options: dict[str, Any] = dict(frozen=step.adapters is not None, precision=step.precision)
    return experts_seconds(experts_work(step), machine, **options).plus(router)


def experts_work(step: PlannedStep) -> ExpertsWork:
    """Returns the work of the busiest device's experts in one layer and micro-batch."""
    experts = step.experts
    k, own_experts = experts.num_experts_per_tok, experts.num_experts // step.mesh.expert
    rows = step.imbalance * step.tokens * k
    return ExpertsWork(step.received, k, rows, own_experts, step.config.hidden_size, experts.moe_intermediate_size)
