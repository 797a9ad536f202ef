"""Bytes that one device needs at the peak of a training step.

The peak is one of three moments:

    a layer's backward pass    nearly all gradients exist
    the loss                   only the vocabulary's gradients exist, and the logits of a chunk of tokens
    AdamW                      no activations are left

With several micro-batches float32 sums of all gradients exist throughout. Where passes are joined (`PlannedStep.joins_passes`),
layers add to the sums directly, and several micro-batches are in flight.
"""

from typing import NamedTuple

from moe_jax.config import Stage
from moe_jax.cost.fp8 import copies_bytes
from moe_jax.cost.frozen_weights import frozen_bytes, quantised_layer
from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.planned_step import BYTES, PlannedAdapters, PlannedStep
from moe_jax.cost.schedules import product_bytes, slots, stage_copies
from moe_jax.cost.workspace import (
    activations,
    backward_workspace,
    context_workspace,
    gathered_layer,
    gathered_layers,
    kept_by_layer,
    layer_workspace,
    loss_workspace,
    optimizer_workspace,
)
from moe_jax.parallel.choices import UNIFORM


def memory_bytes(step: PlannedStep) -> dict[str, float]:
    """Returns the peak by part, in bytes. `workspace` is the rest of the peak after the other four parts."""
    if step.adapters is not None:
        return _of_adapters(step, step.adapters)
    own, updated = sum(p.own_size for p in step.parameters), sum(map(step.updated_size, step.parameters))
    of_param = BYTES[step.param_dtype]
    held = _of_joined_passes(step) if step.joins_passes else _of_passes_in_turn(step)
    return {
        # Beside bf16 parameters, the other halves of the masters lie as the moments do.
        "parameters": of_param * own + (4 - of_param) * updated,
        "moments": 2 * BYTES[step.moment_dtype] * updated,
        "gradients": held.gradients,
        "activations": min(held.kept, held.peak - held.gradients),
        "workspace": held.peak - held.gradients - min(held.kept, held.peak - held.gradients),
    }


def _of_adapters(step: PlannedStep, adapters: PlannedAdapters) -> dict[str, float]:
    """Returns the peak of a step that trains adapters: frozen weights have no gradients, and the head's is not made.

    The sums of micro-batches lie beside a micro-batch's gradients. AdamW uses one more array of each adapter.
    """
    trained = 4 * adapters.parameters
    gradients = trained * (2 if step.accumulates else 1)
    kept = sum(_layers_kept(step, stage.num_layers) * kept_by_layer(step, stage) for stage in step.stages)
    made_whole = max(quantised_layer(step, number).whole for number, _ in enumerate(step.stages))
    passes = kept + max(made_whole + backward_workspace(step), loss_workspace(step, step.tokens))
    return {
        "parameters": frozen_bytes(step) + trained,
        "moments": 2 * BYTES[step.moment_dtype] * adapters.parameters,
        "gradients": gradients,
        "activations": kept,
        "workspace": max(passes, trained) - kept,
    }


class _Held(NamedTuple):
    """Bytes beside parameters and moments."""

    gradients: float
    kept: float
    """Residuals of layers."""
    peak: float


def _of_passes_in_turn(step: PlannedStep) -> _Held:
    """Returns the bytes of micro-batches one after the other; with several, the sums and the gradients of one exist."""
    config, own = step.config, sum(p.own_size for p in step.parameters)
    sums, added_in_place = 0.0, 0
    if step.gradient_accumulation > 1:
        sums, added_in_place = 4 * own, sum(p.own_size for p in step.parameters if step.adds_in_kernel(p))
    gradients = BYTES[step.param_dtype] * (own - added_in_place)
    kept = sum(_layers_kept(step, stage.num_layers) * kept_by_layer(step, stage) for stage in step.stages)
    # Gradients of the model's own loss stay in memory during the passes of the MTP modules.
    waiting = 4 * len(config.mtp_stages) * config.hidden_size * (config.vocab_size + step.tokens)
    kept_and_copies = kept + copies_bytes(step)
    backward = max(gradients, waiting) + kept_and_copies + backward_workspace(step)
    head = (ELEMENT + 4) * config.vocab_size * config.hidden_size
    loss = kept_and_copies + waiting + head + loss_workspace(step, step.tokens)
    optimizer = (0 if sums else gradients) + optimizer_workspace(step)
    return _Held(sums + gradients, kept, sums + max(backward, loss, optimizer))


def _of_joined_passes(step: PlannedStep) -> _Held:
    """Returns the bytes where forward and backward passes are joined, in a pipe or without.

    Arrays that are gathered once a step are whole on every device, with their sums. A slot keeps the residuals of one chunk.
    Stages beside the joined one keep at most two micro-batches for each rank, of which a rank has its part of the rows. A
    module keeps one, for its passes follow each other. The gradients of all embedded tokens are kept until the end.
    """
    config, number = step.config, step.joined_stage
    stage, ranks = step.stages[number], step.mesh.pipe
    sums = 4 * sum(p.own_size if p.by_layer else p.used_size for p in step.parameters)
    whole: float = ELEMENT * sum(p.used_size for p in step.parameters if p.gather_axes and not p.by_layer)
    own_tokens = step.tokens / ranks
    embedded = ELEMENT * step.gradient_accumulation * own_tokens * config.hidden_size
    of_chunk = step.layers_of_chunk * kept_by_layer(step, stage)
    in_layers = sum(p.own_size for p in step.parameters if p.by_layer)
    if step.pipe_schedule not in UNIFORM:
        own_slots = slots(step)
        kept = (own_slots.saved + 1) * of_chunk
        # One slot of each kind takes what is not needed.
        kept += (own_slots.inputs + own_slots.gradients + 2) * ELEMENT * step.tokens * config.hidden_size
        # A rank of DualPipe computes twice its layers, and holds their parameters and sums beside its own.
        whole += ELEMENT * (1 + stage_copies(step)) * in_layers if stage_copies(step) else 0
        sums += 4 * in_layers if step.pipe_schedule == "dualpipe" else 0
    elif step.offloads_slots:
        # A chunk comes back from the host's memory as a whole.
        kept = of_chunk
    elif ranks > 1:
        # Passes that do not exist have a slot of their own, and a backward pass reads a copy of its slot.
        kept = (step.slots + 2) * of_chunk
    else:
        kept = step.slots * _layers_kept(step, step.layers_of_chunk) * kept_by_layer(step, stage)
    # The forward pass of a tick has gathered layers of its own, and makes the residuals of a layer.
    workspaces = [layer_workspace(step, number) + 2 * gathered_layer(step, number) + activations(step, stage)]
    kept += product_bytes(step)
    for other, own in enumerate(step.stages):
        if other != number:
            beside = step.beside_pipe
            kept += _in_flight(step, own) * _layers_kept(step, own.num_layers) * kept_by_layer(beside, own)
            gathers = gathered_layers(beside, other) if ranks > 1 else 0
            workspaces.append(layer_workspace(beside, other) - gathers)
    waiting = 4 * len(config.mtp_stages) * config.hidden_size * own_tokens
    passes = max(max(workspaces) + context_workspace(step), loss_workspace(step, own_tokens)) + waiting
    passes += whole + embedded + kept + copies_bytes(step)
    return _Held(sums, kept, sums + max(passes, optimizer_workspace(step)))


def host_bytes(step: PlannedStep) -> float:
    """Returns the bytes that a device keeps in its host's memory."""
    if step.remat != "offload":
        return 0.0
    if not step.offloads_slots:
        layers = sum(stage.num_layers * kept_by_layer(step, stage) for stage in step.stages)
        return (step.slots if step.joins_passes else 1) * layers
    # Passes that do not exist have a slot of their own.
    kept = (step.slots + 1) * step.layers_of_chunk * kept_by_layer(step, step.stages[step.joined_stage])
    beside = [stage for number, stage in enumerate(step.stages) if number != step.joined_stage]
    return kept + sum(_in_flight(step, own) * own.num_layers * kept_by_layer(step.beside_pipe, own) for own in beside)


def _in_flight(step: PlannedStep, stage: Stage) -> int:
    """Returns the number of micro-batches of which a stage beside the joined one keeps residuals."""
    return 1 if step.is_module(stage) else min(2 * step.mesh.pipe, step.gradient_accumulation)


def _layers_kept(step: PlannedStep, layers: int) -> int:
    """Returns the number of layers whose residuals the device holds. With "offload" inputs of two are on their way."""
    return 2 if step.remat == "offload" else layers
