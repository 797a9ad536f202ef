"""How long a training step takes and how much memory a device needs, for a model on a mesh: predicted, not measured.

A step is the sum of its parts. The kernels of one layer come from `cost.layer`, the bytes that travel from the layout
(`parallel.layout`) and the transport, the rates from `cost.machine`. Gathers of a layer's parameters, and the sums of their
gradients, run beside the computation of another layer: by copies they take but the memory's time, by NCCL `Machine.hidden` of
them takes none. What hides of an exchange and of attention's hops, `cost.travel` says. Copies to and from the host's memory
hide; nothing else overlaps. docs/scaling.md compares it with what was measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_jax.config import Stage
from moe_jax.cost.attention import attention_seconds, moved_elements
from moe_jax.cost.flops import attention_matrices, training_flops_per_token
from moe_jax.cost.layer import (
    Experts,
    Passes,
    elementwise_seconds,
    experts_seconds,
    matmul_seconds,
    router_seconds,
)
from moe_jax.cost.machine import H200, Machine
from moe_jax.cost.memory import host_bytes, kept_by_layer, memory_bytes
from moe_jax.cost.run import BYTES, Run
from moe_jax.cost.travel import context_seconds, exchange_seconds, gather_seconds, once_a_step_seconds
from moe_jax.kernels.cross_entropy import CHUNK_TOKENS


@dataclass(frozen=True)
class Prediction:
    """What one device does in a step.

    Attributes:
      seconds: by part; they add up to the step.
      hidden_seconds: what gathers and sums beside computation take without being part of the step.
      bytes: by part; they add up to the peak.
    """

    run: Run
    machine: Machine
    seconds: dict[str, float]
    hidden_seconds: float
    bytes: dict[str, float]

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> float:
        """The peak of a device."""
        return sum(self.bytes.values())

    @property
    def host_bytes(self) -> float:
        """What it keeps in its host's memory."""
        return host_bytes(self.run)

    @property
    def fits(self) -> bool:
        """Whether the machine has that."""
        return self.memory_bytes <= self.machine.memory

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.run.tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs of one device (`moe_jax.cost.flops`: what is computed again counts once)."""
        keys = self.run.sequence_length / 2 if self.run.keys_per_token is None else self.run.keys_per_token
        return training_flops_per_token(self.run.config, 2 * keys) * self.tokens_per_second


def predict(run: Run, machine: Machine = H200) -> Prediction:
    """The cost of one step of `run`.

    Raises:
      ValueError: hops by copies on more devices than a host of the machine has.
    """
    if run.hops == "copies" and run.mesh.size > machine.gpus_of_host:
        raise ValueError(
            f"hops='copies' needs all devices in one process, and a host has {machine.gpus_of_host}; the mesh has "
            f"{run.mesh.size}: take hops='nccl'"
        )
    layers: dict[str, float] = dict.fromkeys(("experts", "projections", "attention", "elementwise", "kept", "overhead"), 0.0)
    travel: dict[str, float] = dict.fromkeys(("exchange", "context", "gathers"), 0.0)
    hidden, again = 0.0, bool(run.remat)
    for number, stage in enumerate(run.stages):
        computing = layer_seconds(run, number, machine)
        for name, passes in computing.items():
            layers[name] += stage.num_layers * passes.total(again)
        if stage.sparse:
            travel["exchange"] += stage.num_layers * exchange_seconds(run, machine).total(again)
        travel["context"] += stage.num_layers * context_seconds(run, computing["attention"], machine).total(again)
        # A pass of the loop computes one layer and gathers another.
        forward = sum(passes.forward for passes in computing.values())
        backward = sum(passes.total(again) for passes in computing.values()) - forward
        for beside, needed in zip((forward, backward), gather_seconds(run, number, machine), strict=True):
            hides = (1.0 if run.hops == "copies" else machine.hidden) * min(needed.travel, beside)
            # Before the loop one layer is gathered beside nothing, and its last pass gathers in vain.
            travel["gathers"] += stage.num_layers * (needed.travel - hides + needed.memory) + needed.travel
            hidden += stage.num_layers * hides
    parts = layers | {"loss": _loss_seconds(run, machine), "optimizer": _optimizer_seconds(run, machine)} | travel
    parts["once a step"] = once_a_step_seconds(run, machine)
    return Prediction(run, machine, parts, hidden, memory_bytes(run))


def layer_seconds(run: Run, number: int, machine: Machine) -> dict[str, Passes]:
    """What a device computes in one layer of a stage, by part."""
    config, tokens, stage = run.config, run.tokens, run.stages[number]
    own = [p for p in run.parameters if p.in_stage and p.path[1] == number]
    attended = run.attended[stage.first_layer : stage.first_layer + stage.num_layers]
    hidden, dense_inter = config.hidden_size, run.shared_inter if stage.sparse else config.intermediate_size
    weights = attention_matrices(config) + 3 * hidden * dense_inter
    # Two norms and two sums; the activation of a dense block, and where experts stand beside it the sum of both.
    elements = (10 + (3 if stage.sparse and dense_inter else 0)) * hidden + moved_elements(config) + 3 * dense_inter
    if run.is_module(stage):
        weights += 2 * hidden * hidden
        # Three norms more, of which two are joined.
        elements += 8 * hidden
    parts = {
        "projections": matmul_seconds(tokens, weights, machine),
        "attention": attention_seconds(tokens, sum(attended) / len(attended), config, machine),
        "elementwise": elementwise_seconds(tokens, elements, machine),
        "overhead": Passes(*(machine.layer_overhead,) * 3),
    }
    if run.param_dtype == "float32":
        # Every pass casts what it computes with: 4 bytes read and 2 written.
        cast = 6 * sum(p.own_size / p.layers for p in own) / machine.hbm
        parts["elementwise"] = Passes(*(seconds + cast for seconds in parts["elementwise"]))
    if stage.sparse:
        parts["experts"] = _sparse_seconds(run, machine)
    return parts | {"kept": _keeping_seconds(run, stage, parts.values(), machine)}


def _keeping_seconds(run: Run, stage: Stage, computing: Iterable[Passes], machine: Machine) -> Passes:
    """What is kept for backward is copied into the stack of the layers' (`layers/stack.py`), and out of it.

    To and from the host's memory that runs beside a layer's computation, and takes what is longer than it.
    """
    size = kept_by_layer(run, stage)
    if run.remat != "offload":
        copy = 2 * size / machine.hbm
        return Passes(copy, 0.0, copy)
    copy = size / machine.host_link
    forward, again, backward = (sum(seconds) for seconds in zip(*computing, strict=True))
    return Passes(max(0.0, copy - forward), 0.0, max(0.0, copy - again - backward))


def _sparse_seconds(run: Run, machine: Machine) -> Passes:
    config = run.moe_config
    k, experts = config.num_experts_per_tok, config.num_experts
    rows = run.imbalance * run.tokens * k
    work = Experts(run.received, k, rows, experts // run.mesh.expert, config.hidden_size, config.moe_intermediate_size)
    grouped = getattr(config, "num_groups", 1) > 1
    router = router_seconds(run.tokens, config.hidden_size, experts, machine, grouped=grouped)
    both = experts_seconds(work, machine), router
    return Passes(*(sum(seconds) for seconds in zip(*both, strict=True)))


def _loss_seconds(run: Run, machine: Machine) -> float:
    """The model's, and one more of each module that predicts further tokens."""
    config = run.config
    one = vocabulary_seconds(run.tokens, config.vocab_size, config.hidden_size, machine)
    return (1 + len(config.mtp_stages)) * one.total(False)


def vocabulary_seconds(tokens: int, vocab: int, hidden: int, machine: Machine) -> Passes:
    """A matmul for the logits and two for the gradients.

    Logits are f32, written and read, for the gradients once more; the gradient of the weights, f32 too, is read and written for
    each chunk of tokens.
    """
    matmul = 2 * tokens * vocab * hidden / machine.vocabulary
    chunks = math.ceil(tokens / CHUNK_TOKENS)
    forward = matmul + 8 * tokens * vocab / machine.hbm
    return Passes(forward, forward, 2 * matmul + (4 * tokens + 8 * chunks * hidden) * vocab / machine.hbm)


def _optimizer_seconds(run: Run, machine: Machine) -> float:
    """Gradients read for their norm and again; masters and both moments read and written."""
    traffic = 2 * BYTES[run.param_dtype] + 2 * 4 + 4 * BYTES[run.moment_dtype]
    return traffic * sum(p.own_size for p in run.parameters) / machine.hbm
