"""Predicts the time of a training step and the memory of a device, for a model on a mesh. Nothing is measured.

A step is the sum of its parts:

    kernels of one layer    `cost.layer`
    bytes that travel       the layout (`parallel.layout`) and the transport
    rates                   `cost.machine`

Gathers of a layer's parameters, and the sums of their gradients, overlap with the computation of another layer. With
peer-to-peer copies they cost only memory bandwidth. With NCCL the share `Machine.hidden` of their time is free. `cost.travel`
says how much of an exchange and of attention's hops is hidden. Copies to and from host memory are hidden; nothing else
overlaps. docs/log/cost_model.md compares predictions with measurements.
"""

import math
from dataclasses import dataclass

from moe_jax.cost.flops import training_flops_per_token
from moe_jax.cost.layer import Passes, experts_sums_seconds
from moe_jax.cost.machine import H200, Machine
from moe_jax.cost.memory import host_bytes, memory_bytes
from moe_jax.cost.pipeline import pipeline_seconds
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.cost.quantised import copies_seconds
from moe_jax.cost.stage import add_stage, experts_work, no_seconds, stage_seconds
from moe_jax.cost.travel import once_a_step_seconds
from moe_jax.kernels.vocabulary import CHUNK_TOKENS


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
        """Bytes that a device keeps in its host's memory."""
        return host_bytes(self.step)

    @property
    def fits(self) -> bool:
        """True if the machine's memory holds `memory_bytes`."""
        return self.memory_bytes <= self.machine.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one device trains on in a second."""
        return self.step.rows * self.step.sequence_length / self.step.mesh.size / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of one device (`moe_jax.cost.flops`: recomputation does not count)."""
        keys = self.step.sequence_length / 2 if self.step.keys_per_token is None else self.step.keys_per_token
        frozen = self.step.adapters is not None
        return training_flops_per_token(self.step.config, 2 * keys, frozen=frozen) * self.tokens_per_second


def predict(step: PlannedStep, machine: Machine = H200) -> Prediction:
    """Returns the predicted cost of one optimizer step.

    Raises:
      ValueError: `hops="copies"` on more devices than a host of the machine has, or FP8 on a machine without kernels for it.
    """
    if step.precision != "bf16" and machine.experts_fp8 is None:
        raise ValueError(f"precision={step.precision!r} has kernels for Hopper GPUs alone; on {machine.name} take 'bf16'")
    if step.hops == "copies" and step.mesh.size > machine.gpus_of_host:
        raise ValueError(
            f"hops='copies' needs all devices in one process, and a host has {machine.gpus_of_host}; the mesh has "
            f"{step.mesh.size}: take hops='nccl'"
        )
    parts, hidden = (pipeline_seconds if step.joins_passes else _seconds_in_turn)(step, machine)
    parts |= {
        "loss": _loss_seconds(step, machine),
        "sums": sums_seconds(step, machine),
        "copies": copies_seconds(step, machine),
        "optimizer": _optimizer_seconds(step, machine),
        "once a step": once_a_step_seconds(step, machine),
    }
    return Prediction(step, machine, parts, hidden, memory_bytes(step))


def _seconds_in_turn(step: PlannedStep, machine: Machine) -> tuple[dict[str, float], float]:
    """Returns the seconds of all layers by part, one micro-batch after the other, and the seconds that are hidden."""
    parts, hidden = no_seconds(), 0.0
    for number, stage in enumerate(step.stages):
        hidden += add_stage(parts, stage_seconds(step, number, stage.num_layers, machine), step.gradient_accumulation)
    return parts, hidden


def _loss_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of the model's loss and of one loss for each MTP module; the ranks of a pipe share the tokens."""
    config = step.config
    shape = step.tokens / step.mesh.pipe, config.vocab_size, config.hidden_size
    one = vocabulary_seconds(*shape, machine, frozen=step.adapters is not None)
    return step.gradient_accumulation * (1 + len(config.mtp_stages)) * one.total(False)


def vocabulary_seconds(tokens: float, vocab: int, hidden: int, machine: Machine, *, frozen: bool = False) -> Passes:
    """Returns the seconds of the vocabulary's loss: a matmul for the logits and two for the gradients.

    The float32 logits are written and read forward, and once more for the gradients. The float32 gradient of the weights is
    read and written for each chunk of tokens; frozen weights have none.
    """
    matmul = 2 * tokens * vocab * hidden / machine.vocabulary
    chunks = math.ceil(tokens / CHUNK_TOKENS)
    forward = matmul + 8 * tokens * vocab / machine.hbm
    if frozen:
        return Passes(forward, forward, matmul + 4 * tokens * vocab / machine.hbm)
    return Passes(forward, forward, 2 * matmul + (4 * tokens + 8 * chunks * hidden) * vocab / machine.hbm)


def _optimizer_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of AdamW: gradients are read twice (once for their norm), masters and moments read and written."""
    if step.adapters is not None:
        return (16 + 4 * BYTES[step.moment_dtype]) * step.adapters.parameters / machine.hbm
    of_gradient = 4 if step.accumulates else BYTES[step.param_dtype]
    traffic = 2 * of_gradient + 2 * 4 + 4 * BYTES[step.moment_dtype]
    return traffic * sum(map(step.updated_size, step.parameters)) / machine.hbm


def sums_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of all micro-batches of a step; 0 where gradients are not summed over micro-batches.

    Sums are read and written. In turn, a micro-batch has a stack of its own gradients, which is read too. Joined passes add
    each layer's gradients at once, and those of an embedding table of its own once a step. Kernels that add
    (`PlannedStep.adds_in_kernel`) hide this behind their matmuls.
    """
    if not step.accumulates:
        return 0.0
    if step.adapters is not None:
        return step.gradient_accumulation * 12 * step.adapters.parameters / machine.hbm
    traffic = 8 if step.joins_passes else 8 + BYTES[step.param_dtype]
    embeds_at_the_end = step.joins_passes and not step.config.tie_word_embeddings
    elements, layers_in_kernel = 0, 0
    for p in step.parameters:
        if step.adds_in_kernel(p):
            layers_in_kernel = max(layers_in_kernel, p.layers)
        elif not (embeds_at_the_end and p.path[0] == "embed_tokens"):
            elements += p.own_size if p.by_layer or not step.joins_passes else p.used_size
    beyond_matmuls = layers_in_kernel * experts_sums_seconds(experts_work(step), machine) if layers_in_kernel else 0.0
    return step.gradient_accumulation * (traffic * elements / machine.hbm + beyond_matmuls)
