"""Seconds of one layer's computation on one GPU: experts, router, projections, and what only moves bytes.

Passes and letters are those of docs/kernels.md: K choices a token, R rows (choices that this device's experts compute), D
hidden, I intermediate. Operands have 2 bytes an element.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.cost.machine import Machine

ELEMENT = 2
"""Bytes."""


class Passes(NamedTuple):
    """Seconds of the forward pass, of what the backward pass computes again under remat, and of the backward pass itself."""

    forward: float
    again: float
    backward: float

    def total(self, remat: bool) -> float:
        """Of a training step."""
        return self.forward + self.backward + (self.again if remat else 0.0)


@dataclass(frozen=True)
class Experts:
    """The work of one device's experts in one layer."""

    tokens: int
    """Rows of x that there are: the device's own tokens, or what dispatch brought."""
    choices: int
    """Of each of them, K, whoever computes them."""
    rows: float
    experts: int
    hidden: int
    inter: int


def experts_seconds(work: Experts, machine: Machine) -> Passes:
    """The passes of backend `mosaic`, each bound by its matmul or by its bytes, in turn.

    A matmul computes whole tiles: 128 rows, 64 where experts have so few, of which the last of an expert is half empty on
    average. It takes the time of the weights' bytes if that is longer.
    """
    fill = 32 if work.rows <= 64 * work.experts else 64
    filled = work.rows + fill * work.experts
    weights = ELEMENT * work.experts * work.hidden * work.inter

    def matmul(matrices: int, rate: float = machine.experts_matmul) -> float:
        flops = 2 * matrices * filled * work.hidden * work.inter
        return max(flops / rate, matrices * weights / machine.hbm)

    plan = work.tokens * work.choices * machine.sort
    # A token is read once and its rows written. XLA's combine reads these, and for a choice that others compute one row again
    # and again: half as long, by the profile of a layer over four GPUs.
    # The first of two forward passes under remat has no gather but in gate_up: counted all the same, 1 % of a layer.
    gather = ELEMENT * work.hidden * (work.tokens + work.rows) / machine.hbm
    elsewhere = work.tokens * work.choices - work.rows
    combine = gather + ELEMENT * work.hidden * elsewhere / 2 / machine.hbm
    gate_up, down = matmul(2), matmul(1)
    # d_act, dw_down; dx, dw_gate_up; gathers of dy and x, the sum of dx.
    backward = matmul(1, machine.experts_d_act) + down + 2 * gate_up + 2 * gather + combine
    # Nothing needs the layer's output again.
    begun = machine.experts_overhead
    return Passes(begun + plan + gather + gate_up + down + combine, begun + plan + gather + gate_up, 2 * begun + backward)


def router_seconds(tokens: int, hidden: int, num_experts: int, machine: Machine, *, grouped: bool = False) -> Passes:
    """A narrow matmul, scores (f32 logits, read and written) and top-k; backward two matmuls of the same bytes.

    A `grouped` choice takes three top-k, the best of each group and the groups before the experts, each of f32 scores that are
    read and written.
    """
    read = (ELEMENT * hidden + 4 * 3 * num_experts) * tokens / machine.hbm
    choices = 3 if grouped else 1
    forward = read + (choices - 1) * 4 * 2 * num_experts * tokens / machine.hbm + choices * tokens * machine.top_k
    return Passes(forward, forward, 2 * read)


def matmul_seconds(tokens: int, weights: float, machine: Machine) -> Passes:
    """Projections with so many weights: 2 FLOPs each a token, twice backward."""
    forward = 2 * tokens * weights / machine.dense_matmul
    return Passes(forward, forward, 2 * forward)


def elementwise_seconds(tokens: int, elements: float, machine: Machine) -> Passes:
    """So many elements a token, read or written; twice backward."""
    forward = ELEMENT * elements * tokens / machine.hbm
    return Passes(forward, forward, 2 * forward)
