"""Seconds in which data travels between devices: tokens to experts, keys round a ring, parameters and their gradients."""

import math
from typing import NamedTuple

from moe_jax.cost.attention import expanded_elements, expansion_seconds, key_value_elements, travelling_elements
from moe_jax.cost.layer import ELEMENT, Passes
from moe_jax.cost.machine import (
    Machine,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_hop_seconds,
)
from moe_jax.cost.run import Run
from moe_jax.parallel.choices import MESH_AXES
from moe_jax.parallel.expert.settings import further_capacity

OF_QUERIES = 0.4
"""The share of attention's backward pass that computes the gradients of queries."""


def exchange_seconds(run: Run, machine: Machine) -> Passes:
    """Dispatch and combine of one layer: forward one of each, backward one of each, and dispatch again under remat."""
    if not run.exchanges:
        return Passes(0.0, 0.0, 0.0)
    config = run.moe_config
    # Ids and weights of the choices, in f32, travel with a token.
    choices = 4 * 2 * config.num_experts_per_tok
    token = ELEMENT * config.hidden_size

    def to_all(slots: float, of_slot: float) -> float:
        # Packed or unpacked by a gather: read and written.
        packing = 2 * slots * of_slot / machine.hbm
        return packing + all_to_all_seconds(machine, slots * of_slot, ("expert",), run.mesh)

    if run.sends_pairwise:
        # Copies run beside experts: what the last step sends home in a forward pass beside the down pass of a device's own
        # tokens. With several steps tokens leave behind the choices.
        others = run.mesh.expert - 1
        last = others % run.pairwise_step or run.pairwise_step
        home = ring_hop_seconds(machine, last * run.tokens * token, ("expert",), run.mesh, copied=True)
        own_choices = run.tokens * config.num_experts_per_tok / run.mesh.expert
        own_down = 2 * own_choices * config.hidden_size * config.moe_intermediate_size / machine.experts_matmul
        home = max(0.0, home - own_down)
        summed = run.received * token / machine.hbm
        if others == last:
            return Passes(home + summed, 0.0, summed)
        dispatch = all_gather_seconds(machine, run.received * choices, ("expert",), run.mesh)
        return Passes(dispatch + home + summed, dispatch, summed)
    if run.gathers_tokens:
        gathers = (all_gather_seconds(machine, run.received * size, ("expert",), run.mesh) for size in (token, choices))
        dispatch = sum(gathers)
        # Summed at home in f32.
        combine = all_to_all_seconds(machine, run.received * token, ("expert",), run.mesh) + run.received * token / machine.hbm
    else:
        dispatch, combine = to_all(run.received, token) + to_all(run.received, choices), to_all(run.received, token)
    slots = run.mesh.expert * further_capacity(run.capacity, config.num_experts_per_tok).tokens
    # Of a further round nothing is kept: backward it is computed again. Its gradients of all weights are added in f32.
    weights = 3 * config.num_experts // run.mesh.expert * config.hidden_size * config.moe_intermediate_size
    round_forward = 2 * to_all(slots, token) + ELEMENT * weights / machine.hbm
    round_backward = 2 * round_forward + 14 * weights / machine.hbm
    further = _further_rounds(run)
    return Passes(dispatch + combine + further * round_forward, dispatch, dispatch + combine + further * round_backward)


def _further_rounds(run: Run) -> int:
    """How many the busiest device needs, of whose choices every device sends as many."""
    config, capacity = run.moe_config, run.capacity
    k, devices = config.num_experts_per_tok, run.mesh.expert
    beyond = run.imbalance * run.tokens * k / devices - capacity.pairs
    return max(0, math.ceil(beyond / further_capacity(capacity, k).pairs))


def context_seconds(run: Run, attention: Passes, machine: Machine) -> Passes:
    """What attention over a split sequence takes beside its kernels, in one layer; docs/context_parallel.md says what travels.

    Of the backward pass the gradients of queries are about two fifths. With `all_gather` the sums of the keys' gradients travel
    beside them.
    """
    devices = run.mesh.context
    if devices == 1:
        return Passes(0.0, 0.0, 0.0)
    keys = ELEMENT * run.tokens * travelling_elements(run.config)
    axes = ("context",)
    if run.context_method == "ulysses":
        return _ulysses_seconds(run, machine)
    expansion = _expansions_seconds(run, machine)
    if run.context_method == "ring":
        return Passes(*map(sum, zip(_ring_seconds(run, keys, attention, machine), expansion, strict=True)))
    # Put into the order of the sequence: read and written.
    forward = all_gather_seconds(machine, devices * keys, axes, run.mesh) + 2 * devices * keys / machine.hbm
    sums = reduce_scatter_seconds(machine, 2 * devices * keys, axes, run.mesh)
    backward = forward + max(0.0, sums - OF_QUERIES * attention.backward)
    return Passes(forward + expansion.forward, forward + expansion.again, backward + expansion.backward)


def _ring_seconds(run: Run, keys: float, attention: Passes, machine: Machine) -> Passes:
    """Hops, and the sums of the turns: in f32, read and written in each turn but the first.

    NCCL's hops do not hide behind kernels that take every core. Copies hide behind the kernel that they run beside: forward
    keys beside a turn's attention; backward the sums of their gradients beside those of the queries, keys beside the rest. The
    keys of several devices in a turn are put into the order of the sequence, and the sums of their gradients taken apart.
    """
    config, axes = run.config, ("context",)
    devices, others = run.mesh.context, run.mesh.context - 1
    turns = math.ceil(others / run.ring_turn)
    copied, of_turn = run.hops == "copies", others / turns

    def exposed(size: float, beside: float) -> float:
        hop = ring_hop_seconds(machine, of_turn * size, axes, run.mesh, copied=copied)
        return max(0.0, hop - beside / devices) if copied else hop

    def moved(size: float) -> float:
        return 2 * size / machine.hbm

    heads, ordered = config.num_attention_heads, of_turn * keys if of_turn > 1 else 0.0
    forward = exposed(keys, attention.forward) + moved(4 * run.tokens * heads * config.value_dim + ordered)
    backward = exposed(keys, (1 - OF_QUERIES) * attention.backward) + exposed(2 * keys, OF_QUERIES * attention.backward)
    backward += moved(4 * run.tokens * (heads * config.key_dim + of_turn * key_value_elements(config)) + 3 * ordered)
    return Passes(*(turns * seconds for seconds in (forward, forward, backward)))


def _expansions_seconds(run: Run, machine: Machine) -> Passes:
    """Keys and values made of latents on every device, beside those of its own tokens; backward for each of two kernels."""
    devices, one = run.mesh.context, expansion_seconds(run.tokens, run.config, machine)
    forward = (devices - 1) * one.forward
    return Passes(forward, forward, 2 * devices * one.forward + (devices - 1) * one.backward)


def _ulysses_seconds(run: Run, machine: Machine) -> Passes:
    """Queries, keys and values go to a part of the heads, and the result back; latents go whole to all, and gradients home."""
    config, axes = run.config, ("context",)
    elements = config.num_attention_heads * (config.key_dim + config.value_dim)
    elements += 0 if expanded_elements(config) else key_value_elements(config)
    to_heads = all_to_all_seconds(machine, ELEMENT * run.tokens * elements, axes, run.mesh)
    if not expanded_elements(config):
        return Passes(to_heads, to_heads, to_heads)
    latents = run.mesh.context * ELEMENT * run.tokens * travelling_elements(config)
    gather = all_gather_seconds(machine, latents, axes, run.mesh) + 2 * latents / machine.hbm
    sums = all_to_all_seconds(machine, latents, axes, run.mesh) + 2 * latents / machine.hbm
    return Passes(to_heads + gather, to_heads + gather, to_heads + sums)


class Gathers(NamedTuple):
    """Seconds of the matrices of one layer and pass that come from, and go to, other devices."""

    travel: float
    """Between devices: may hide behind computation."""
    memory: float
    """Of the device's memory, which computation beside it does not have meanwhile."""


def gather_seconds(run: Run, stage: int, machine: Machine) -> tuple[Gathers, Gathers]:
    """(forward, backward) of one layer: its matrices gathered, backward again, and their gradients sent to who keeps them.

    By copies (`parallel.collectives.direct`) what arrives is read and written once more, into its place, and of gradients
    what leaves is cut out and what arrives is read for the sum.
    """
    gather = sums = Gathers(0.0, 0.0)
    for p in run.parameters:
        if p.in_stage and p.path[1] == stage and p.gather_axes:
            size = ELEMENT * p.used_size / p.layers
            if run.hops == "copies":
                own = size / math.prod(getattr(run.mesh, name) for name in p.gather_axes)
                others = size - own
                travel = ring_hop_seconds(machine, others, p.gather_axes, run.mesh, copied=True)
                of_gather = Gathers(travel, (2 * others + 2 * size) / machine.hbm)
                of_sums = Gathers(travel, (4 * others + size + own) / machine.hbm)
            else:
                of_gather = Gathers(all_gather_seconds(machine, size, p.gather_axes, run.mesh), 0.0)
                of_sums = Gathers(all_to_all_seconds(machine, size, p.gather_axes, run.mesh), 0.0)
            gather, sums = _added(gather, of_gather), _added(sums, of_sums)
    return gather, _added(gather, sums)


def _added(a: Gathers, b: Gathers) -> Gathers:
    return Gathers(a.travel + b.travel, a.memory + b.memory)


def once_a_step_seconds(run: Run, machine: Machine) -> float:
    """The vocabulary's two matrices gathered and their gradients sent; f32 sums of gradients over axes that split them not."""
    seconds = 0.0
    for p in run.parameters:
        if not p.in_stage and p.gather_axes:
            seconds += all_gather_seconds(machine, ELEMENT * p.used_size, p.gather_axes, run.mesh)
            seconds += all_to_all_seconds(machine, ELEMENT * p.used_size, p.gather_axes, run.mesh)
        whole = tuple(name for name in MESH_AXES if name not in p.split_axes)
        seconds += all_reduce_seconds(machine, 4 * p.own_size, whole, run.mesh)
    return seconds
