"""Predicts the time of a training step and the memory of a device, for a model on a mesh. Nothing is measured.

A step is the sum of its parts:

    kernels of one layer    `cost.layer`
    bytes that travel       the layout (`parallel.layout`) and the transport
    rates                   `cost.machine`

Gathers of a layer's parameters, and the sums of their gradients, overlap with the computation of another layer. With
peer-to-peer copies they cost only memory bandwidth. With NCCL the share `Machine.hidden` of their time is free. `cost.travel`
says how much of an exchange and of attention's hops is hidden. Copies to and from host memory are hidden; nothing else
overlaps. docs/scaling.md compares predictions with measurements.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_jax.config import Stage
from moe_jax.cost.attention import attention_seconds, moved_elements
from moe_jax.cost.flops import attention_matrices, training_flops_per_token
from moe_jax.cost.layer import (
    ExpertsWork,
    Passes,
    elementwise_seconds,
    experts_seconds,
    matmul_seconds,
    router_seconds,
)
from moe_jax.cost.machine import H200, Machine
from moe_jax.cost.memory import host_bytes, kept_by_layer, memory_bytes
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.cost.travel import context_seconds, exchange_seconds, gather_seconds, once_a_step_seconds
from moe_jax.kernels.cross_entropy import CHUNK_TOKENS


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of one device in one step.

    Attributes:
      seconds: by part; the parts add up to the step.
      hidden_seconds: time of gathers and sums that overlaps with computation, and so is not part of the step.
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
        """Bytes that a device keeps in its host's memory."""
        return host_bytes(self.step)

    @property
    def fits(self) -> bool:
        """True if the machine's memory holds `memory_bytes`."""
        return self.memory_bytes <= self.machine.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one device trains on in a second."""
        return self.step.tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of one device (`moe_jax.cost.flops`: recomputation does not count)."""
        keys = self.step.sequence_length / 2 if self.step.keys_per_token is None else self.step.keys_per_token
        return training_flops_per_token(self.step.config, 2 * keys) * self.tokens_per_second


def predict(step: PlannedStep, machine: Machine = H200) -> Prediction:
    """Returns the predicted cost of one optimizer step.

    Raises:
      ValueError: `hops="copies"` on more devices than a host of the machine has.
    """
    if step.hops == "copies" and step.mesh.size > machine.gpus_of_host:
        raise ValueError(
            f"hops='copies' needs all devices in one process, and a host has {machine.gpus_of_host}; the mesh has "
            f"{step.mesh.size}: take hops='nccl'"
        )
    layers: dict[str, float] = dict.fromkeys(("experts", "projections", "attention", "elementwise", "kept", "overhead"), 0.0)
    travel: dict[str, float] = dict.fromkeys(("exchange", "context", "gathers"), 0.0)
    hidden, again = 0.0, bool(step.remat)
    for number, stage in enumerate(step.stages):
        computing = layer_seconds(step, number, machine)
        for name, passes in computing.items():
            layers[name] += stage.num_layers * passes.total(again)
        if stage.sparse:
            travel["exchange"] += stage.num_layers * exchange_seconds(step, machine).total(again)
        travel["context"] += stage.num_layers * context_seconds(step, computing["attention"], machine).total(again)
        # One iteration of the loop over layers computes a layer and gathers the next.
        forward = sum(passes.forward for passes in computing.values())
        backward = sum(passes.total(again) for passes in computing.values()) - forward
        for beside, needed in zip((forward, backward), gather_seconds(step, number, machine), strict=True):
            hides = (1.0 if step.hops == "copies" else machine.hidden) * min(needed.travel, beside)
            # The gather before the loop overlaps with nothing, and the last iteration's gather is not used.
            travel["gathers"] += stage.num_layers * (needed.travel - hides + needed.memory) + needed.travel
            hidden += stage.num_layers * hides
    parts = layers | {"loss": _loss_seconds(step, machine), "optimizer": _optimizer_seconds(step, machine)} | travel
    parts["once a step"] = once_a_step_seconds(step, machine)
    return Prediction(step, machine, parts, hidden, memory_bytes(step))


def layer_seconds(step: PlannedStep, number: int, machine: Machine) -> dict[str, Passes]:
    """Returns the seconds that a device computes in one layer of stage `number`, by part."""
    config, tokens, stage = step.config, step.tokens, step.stages[number]
    own = [p for p in step.parameters if p.in_stage and p.path[1] == number]
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
    parts = {
        "projections": matmul_seconds(tokens, weights, machine),
        "attention": attention_seconds(tokens, sum(attended) / len(attended), config, machine),
        "elementwise": elementwise_seconds(tokens, elements, machine),
        "overhead": Passes(*(machine.layer_overhead,) * 3),
    }
    if step.param_dtype == "float32":
        # Every pass casts its parameters: 4 bytes read and 2 written.
        cast = 6 * sum(p.own_size / p.layers for p in own) / machine.hbm
        parts["elementwise"] = Passes(*(seconds + cast for seconds in parts["elementwise"]))
    if stage.sparse:
        parts["experts"] = _sparse_seconds(step, machine)
    return parts | {"kept": _keeping_seconds(step, stage, parts.values(), machine)}


def _keeping_seconds(step: PlannedStep, stage: Stage, computing: Iterable[Passes], machine: Machine) -> Passes:
    """Returns the seconds to copy a layer's residuals into the stack of all layers (`layers/passes.py`) and out of it.

    Copies to and from host memory overlap with the layer's computation; only the excess counts.
    """
    size = kept_by_layer(step, stage)
    if step.remat != "offload":
        copy = 2 * size / machine.hbm
        return Passes(copy, 0.0, copy)
    copy = size / machine.host_link
    forward, again, backward = (sum(seconds) for seconds in zip(*computing, strict=True))
    return Passes(max(0.0, copy - forward), 0.0, max(0.0, copy - again - backward))


def _sparse_seconds(step: PlannedStep, machine: Machine) -> Passes:
    experts, hidden = step.experts, step.config.hidden_size
    k, own_experts = experts.num_experts_per_tok, experts.num_experts // step.mesh.expert
    rows = step.imbalance * step.tokens * k
    work = ExpertsWork(step.received, k, rows, own_experts, hidden, experts.moe_intermediate_size)
    router = router_seconds(step.tokens, hidden, experts.num_experts, machine, grouped=experts.num_groups > 1)
    both = experts_seconds(work, machine), router
    return Passes(*(sum(seconds) for seconds in zip(*both, strict=True)))


def _loss_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of the model's loss and of one loss for each MTP module."""
    config = step.config
    one = vocabulary_seconds(step.tokens, config.vocab_size, config.hidden_size, machine)
    return (1 + len(config.mtp_stages)) * one.total(False)


def vocabulary_seconds(tokens: int, vocab: int, hidden: int, machine: Machine) -> Passes:
    """Returns the seconds of the vocabulary's loss: a matmul for the logits and two for the gradients.

    The float32 logits are written and read forward, and once more for the gradients. The float32 gradient of the weights is
    read and written for each chunk of tokens.
    """
    matmul = 2 * tokens * vocab * hidden / machine.vocabulary
    chunks = math.ceil(tokens / CHUNK_TOKENS)
    forward = matmul + 8 * tokens * vocab / machine.hbm
    return Passes(forward, forward, 2 * matmul + (4 * tokens + 8 * chunks * hidden) * vocab / machine.hbm)


def _optimizer_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of AdamW: gradients are read twice (once for their norm), masters and moments read and written."""
    traffic = 2 * BYTES[step.param_dtype] + 2 * 4 + 4 * BYTES[step.moment_dtype]
    return traffic * sum(map(step.updated_size, step.parameters)) / machine.hbm
