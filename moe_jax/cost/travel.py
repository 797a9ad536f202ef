"""Seconds of communication between devices: tokens to experts, keys around a ring, parameters and their gradients."""

import math
from typing import NamedTuple

from moe_jax.cost.layer import Passes, expansion_seconds
from moe_jax.cost.machine import (
    Machine,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_hop_seconds,
)
from moe_jax.cost.parameters import BYTES, ELEMENT
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.parallel.choices import MESH_AXES
from moe_jax.parallel.expert.settings import devices_per_step

QUERIES_SHARE = 0.4
"""Share of attention's backward pass that computes the gradients of queries."""


def exchange_seconds(step: PlannedStep, machine: Machine) -> Passes:
    """Returns the seconds of expert dispatch and combine in one layer: one of each per pass, and dispatch again under remat.

    Tokens may travel in FP8. Outputs and both gradients do not.
    """
    exchange = step.exchange
    if exchange is None:
        return Passes(0.0, 0.0, 0.0)
    experts, hidden = step.experts, step.config.hidden_size
    k, inter = experts.num_experts_per_tok, experts.moe_intermediate_size
    # 4-byte ids and weights of the choices travel with a token.
    choices = 4 * 2 * k
    token, token_sent = ELEMENT * hidden, step.token_bytes * hidden

    def to_all(slots: float, slot_bytes: float) -> float:
        # Packed or unpacked by a gather: read and written.
        packing = 2 * slots * slot_bytes / machine.hbm
        return packing + all_to_all_seconds(machine, slots * slot_bytes, ("expert",), step.mesh)

    if exchange.transport == "pairwise":
        # Copies overlap with experts: the last step's results return during the down pass of the device's own tokens.
        # In several steps, tokens are sent after the choices.
        _, *others = devices_per_step(exchange)
        home = ring_hop_seconds(machine, others[-1] * step.tokens * token, ("expert",), step.mesh, copied=True)
        own_choices = step.tokens * k / step.mesh.expert
        own_down = 2 * own_choices * hidden * inter / machine.experts_matmul
        home = max(0.0, home - own_down)
        summed = step.received * token / machine.hbm
        if len(others) == 1:
            return Passes(home + summed, 0.0, summed)
        dispatch = all_gather_seconds(machine, step.received * choices, ("expert",), step.mesh)
        return Passes(dispatch + home + summed, dispatch, summed)
    if exchange.transport == "gather":
        sent, gradients, with_choices = (
            all_gather_seconds(machine, step.received * size, ("expert",), step.mesh) for size in (token_sent, token, choices)
        )
        # Summed in float32 on the token's own device.
        combine = (
            all_to_all_seconds(machine, step.received * token, ("expert",), step.mesh) + step.received * token / machine.hbm
        )
    else:
        sent, gradients, with_choices = (to_all(step.received, size) for size in (token_sent, token, choices))
        combine = gradients
    dispatch = sent + with_choices
    slots = step.mesh.expert * exchange.further.tokens
    # Further rounds keep no residuals: backward recomputes them. Their gradients of all weights are accumulated in float32.
    weights = 3 * experts.num_experts // step.mesh.expert * hidden * inter
    round_forward = to_all(slots, token_sent) + to_all(slots, token) + ELEMENT * weights / machine.hbm
    round_backward = round_forward + 2 * to_all(slots, token) + (ELEMENT + 14) * weights / machine.hbm
    # The busiest device counts; every device sends it an equal number of choices.
    beyond = step.busiest / step.mesh.expert - exchange.first.pairs
    further = max(0, math.ceil(beyond / exchange.further.pairs))
    backward = gradients + with_choices + combine
    return Passes(dispatch + combine + further * round_forward, dispatch, backward + further * round_backward)


def context_seconds(step: PlannedStep, attention: Passes, machine: Machine) -> Passes:
    """Returns the seconds that context parallelism adds to the attention kernels of one layer.

    docs/context_parallel.md lists the data that travels. With `all_gather`, the sums of the keys' gradients travel while the
    gradients of queries are computed: about two fifths of the backward pass.
    """
    devices = step.mesh.context
    if devices == 1:
        return Passes(0.0, 0.0, 0.0)
    keys = ELEMENT * step.tokens * step.mixer.travelling_elements
    axes = ("context",)
    if step.context_method == "ulysses":
        return _ulysses_seconds(step, machine)
    # Other devices' latents are expanded; the backward pass expands them for each of its two kernels.
    one = expansion_seconds(step.tokens, step.mixer, machine)
    arriving = (devices - 1) * one.forward
    expansion = Passes(arriving, arriving, 2 * devices * one.forward + (devices - 1) * one.backward)
    if step.context_method == "ring":
        return _ring_seconds(step, keys, attention, machine).plus(expansion)
    # Reordered to the order of the sequence: read and written.
    forward = all_gather_seconds(machine, devices * keys, axes, step.mesh) + 2 * devices * keys / machine.hbm
    sums = reduce_scatter_seconds(machine, 2 * devices * keys, axes, step.mesh)
    backward = forward + max(0.0, sums - QUERIES_SHARE * attention.backward)
    return Passes(forward + expansion.forward, forward + expansion.again, backward + expansion.backward)


def _ring_seconds(step: PlannedStep, keys: float, attention: Passes, machine: Machine) -> Passes:
    """Returns the seconds of the ring's hops and of its float32 accumulators, read and written in every step except the first.

    NCCL's hops are not hidden: attention's kernels occupy every SM. Peer-to-peer copies are hidden by the running kernel.
    Forward, keys travel during attention. Backward, the sums of keys' gradients travel while gradients of queries are computed,
    and keys during the rest. Keys of several devices in one step are reordered to the order of the sequence, and the sums of
    their gradients are split again.
    """
    mixer, axes = step.mixer, ("context",)
    devices, others = step.mesh.context, step.mesh.context - 1
    ring_steps = math.ceil(others / step.ring_step)
    copied, senders = step.hops == "copies", others / ring_steps

    def exposed(size: float, computing: float) -> float:
        hop = ring_hop_seconds(machine, senders * size, axes, step.mesh, copied=copied)
        return max(0.0, hop - computing / devices) if copied else hop

    def moved(size: float) -> float:
        return 2 * size / machine.hbm

    ordered = senders * keys if senders > 1 else 0.0
    forward = exposed(keys, attention.forward) + moved(4 * step.tokens * mixer.heads * mixer.value_dim + ordered)
    backward = exposed(keys, (1 - QUERIES_SHARE) * attention.backward)
    backward += exposed(2 * keys, QUERIES_SHARE * attention.backward)
    backward += moved(4 * step.tokens * (mixer.heads * mixer.key_dim + senders * mixer.key_value_elements) + 3 * ordered)
    return Passes(*(ring_steps * seconds for seconds in (forward, forward, backward)))


def _ulysses_seconds(step: PlannedStep, machine: Machine) -> Passes:
    """Returns the seconds of Ulysses' exchanges: queries, keys and values to a share of the heads, and the result back.

    Latents go whole to all devices, and their gradients back.
    """
    mixer, axes = step.mixer, ("context",)
    elements = mixer.head_elements + mixer.key_value_elements - mixer.expanded_elements
    to_heads = all_to_all_seconds(machine, ELEMENT * step.tokens * elements, axes, step.mesh)
    if not mixer.expanded_elements:
        return Passes(to_heads, to_heads, to_heads)
    latents = step.mesh.context * ELEMENT * step.tokens * mixer.travelling_elements
    gather = all_gather_seconds(machine, latents, axes, step.mesh) + 2 * latents / machine.hbm
    sums = all_to_all_seconds(machine, latents, axes, step.mesh) + 2 * latents / machine.hbm
    return Passes(to_heads + gather, to_heads + gather, to_heads + sums)


class Gathers(NamedTuple):
    """Seconds of the all-gathers of one layer's parameters, or of the reduce-scatters of its gradients, in one pass."""

    travel: float
    """Seconds of transfers between devices, which may overlap with computation."""
    memory: float
    """Seconds of the device's memory bandwidth, which overlapping computation then lacks."""


def gather_seconds(step: PlannedStep, stage: int, machine: Machine) -> tuple[Gathers, Gathers]:
    """Returns the FSDP communication of one layer: (forward pass, backward pass).

    Both passes gather the layer's matrices. The backward pass also sends gradients of trained matrices to the devices that
    store them. With peer-to-peer copies (`parallel.collectives.direct`), received matrices are copied into place. Gradients to
    send are sliced out, and received gradients are read for the sum. Experts in FP8 arrive in half the bytes.
    """
    gathers, returns = [Gathers(0.0, 0.0)], [Gathers(0.0, 0.0)]
    for p in step.parameters_of_stages[stage]:
        if not p.gather_axes:
            continue
        elements, where = p.used_size / p.layers, (p.gather_axes, step.mesh)
        arriving, size = p.travelling_bytes * elements, ELEMENT * elements
        if step.hops == "copies":
            share = 1 / math.prod(getattr(step.mesh, name) for name in p.gather_axes)
            others, own, from_others = (1 - share) * size, share * size, (1 - share) * arriving
            travel, back = (ring_hop_seconds(machine, moved, *where, copied=True) for moved in (from_others, others))
            gathers.append(Gathers(travel, (2 * from_others + 2 * arriving) / machine.hbm))
            returns.append(Gathers(back, (4 * others + size + own) / machine.hbm))
        else:
            gathers.append(Gathers(all_gather_seconds(machine, arriving, *where), 0.0))
            returns.append(Gathers(all_to_all_seconds(machine, size, *where), 0.0))
    if step.adapters is not None:
        returns = []
    forward, backward = (Gathers(*map(sum, zip(*each, strict=True))) for each in (gathers, gathers + returns))
    return forward, backward


def once_a_step_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds of communication outside the loops over layers.

    The vocabulary's two matrices are gathered and their gradients sent, and so are the layers outside a pipe. Gradients are
    summed in float32 over each axis that does not split them. Where `data` splits the optimizer's state, a device receives only
    its part's sum, and the updated parameters are gathered.

    Where passes are joined, all this happens once a step, and gradients travel in float32. Else each micro-batch repeats the
    gathers, sends and sums, except sums of parts.
    """
    if step.adapters is not None:
        outside = [p for p in step.parameters if not p.by_layer and p.gather_axes]
        seconds = sum(all_gather_seconds(machine, ELEMENT * p.used_size, p.gather_axes, step.mesh) for p in outside)
        times = 1 if step.joins_passes else step.gradient_accumulation
        return times * (seconds + all_reduce_seconds(machine, 4 * step.trained, MESH_AXES, step.mesh))
    times = 1 if step.joins_passes else step.gradient_accumulation
    of_gradient = 4 if step.joins_passes else ELEMENT
    seconds = 0.0
    for p in step.parameters:
        if not p.by_layer and p.gather_axes:
            seconds += times * all_gather_seconds(machine, p.travelling_bytes * p.used_size, p.gather_axes, step.mesh)
            seconds += times * all_to_all_seconds(machine, of_gradient * p.used_size, p.gather_axes, step.mesh)
        whole = tuple(name for name in MESH_AXES if name not in p.split_axes)
        if p.updated_size < p.own_size:
            whole = tuple(name for name in whole if name != "data")
            seconds += reduce_scatter_seconds(machine, 4 * p.own_size, ("data",), step.mesh)
            seconds += all_gather_seconds(machine, BYTES[step.param_dtype] * p.own_size, ("data",), step.mesh)
        seconds += times * all_reduce_seconds(machine, 4 * p.own_size, whole, step.mesh)
    return seconds
