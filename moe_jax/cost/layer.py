"""Seconds of one layer's computation on one GPU: experts, router, projections and elementwise work.

Passes and letters follow docs/kernels.md: K choices a token, R rows (choices that this device's experts compute), D hidden, I
intermediate. Operands have 2 bytes an element.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.cost.machine import Machine
from moe_jax.models.precision import PrecisionName

ELEMENT = 2
"""Bytes of one element of an operand."""


class Passes(NamedTuple):
    """Seconds of the forward pass, of its recomputation under remat (`again`), and of the backward pass itself."""

    forward: float
    again: float
    backward: float

    def total(self, remat: bool) -> float:
        """Returns the seconds in a training step."""
        return self.forward + self.backward + (self.again if remat else 0.0)

    def plus(self, *others: "Passes") -> "Passes":
        """Returns the sum, pass by pass."""
        return Passes(*map(sum, zip(self, *others, strict=True)))


@dataclass(frozen=True)
class ExpertsWork:
    """The work of one device's experts in one layer."""

    tokens: int
    """Rows of x: the device's own tokens, or the token slots after dispatch."""
    choices: int
    """Choices of each token (K), on whichever device they are computed."""
    rows: float
    """Choices that this device's experts compute (R)."""
    experts: int
    """Experts of this device."""
    hidden: int
    inter: int


def experts_seconds(work: ExpertsWork, machine: Machine, *, frozen: bool = False, precision: PrecisionName = "bf16") -> Passes:
    """Returns the seconds of backend `mosaic`, whose kernels run one after another.

    A matmul computes whole tiles of 128 rows, or of 64 rows where experts have at most 64 on average. The last tile of an
    expert is half empty on average. If reading the weights takes longer than the FLOPs, that time counts. Frozen weights have
    no gradients, and their backward pass gathers no rows of x. In FP8 operands have 1 byte, but those of weights' gradients.
    """
    in_fp8 = precision != "bf16"
    filled = _filled_rows(work)
    elements = work.experts * work.hidden * work.inter

    def matmul(matrices: int, rate: float = machine.experts_matmul, element: int = ELEMENT) -> float:
        flops = 2 * matrices * filled * work.hidden * work.inter
        return max(flops / rate, matrices * element * elements / machine.hbm)

    if in_fp8:
        assert machine.experts_fp8 is not None, "`cost.predict` refuses it"
        rates = machine.experts_fp8
        gate_up, down, dx, d_act = (matmul(n, rate, 1) for n, rate in zip((2, 1, 2, 1), rates, strict=True))
    else:
        gate_up, down, dx, d_act = matmul(2), matmul(1), matmul(2), matmul(1, machine.experts_d_act)
    plan = work.tokens * work.choices * machine.sort
    # A token is read once and its rows are written. XLA's combine reads these rows. For a choice of another device it reads the
    # same row again and again, in half the time (profile of a layer over four GPUs).
    # The first of two forward passes under remat gathers inside gate_up only. Its gather counts all the same: 1 % of a layer.
    gather = ELEMENT * work.hidden * (work.tokens + work.rows) / machine.hbm
    rounded = work.hidden * (ELEMENT * work.tokens + work.rows) / machine.hbm if in_fp8 else gather
    elsewhere = work.tokens * work.choices - work.rows
    combine = gather + ELEMENT * work.hidden * elsewhere / 2 / machine.hbm
    # A gather of dy, d_act, dx and its sum; then dw_down, dw_gate_up and the gather of x. In FP8 these gather dy once more.
    backward = rounded + d_act + dx + combine
    if not frozen:
        backward += matmul(1) + matmul(2) + gather * (2 if in_fp8 else 1)
    # h is read and written in both forms.
    kept = (ELEMENT + 1) * 2 * work.inter * work.rows / machine.hbm if precision == "fp8_kept" else 0.0
    overhead = machine.experts_overhead
    # Recomputation stops before the down projection: backward does not need the layer's output.
    again = overhead + plan + rounded + gate_up + kept
    return Passes(again + down + combine, again, 2 * overhead + backward + kept)


def experts_sums_seconds(work: ExpertsWork, machine: Machine) -> float:
    """Returns the seconds by which kernels that add the weights' gradients to float32 sums take longer than their matmuls.

    The sums are read and written while three of nine matmuls compute. The slower of both counts.
    """
    weights = 3 * work.experts * work.hidden * work.inter
    flops = 6 * _filled_rows(work) * work.hidden * work.inter
    return max(0.0, 8 * weights / machine.experts_sums - flops / machine.experts_matmul)


def _filled_rows(work: ExpertsWork) -> float:
    """Returns the rows of whole tiles: of 128 rows, or of 64 where experts have at most 64 on average."""
    return work.rows + (32 if work.rows <= 64 * work.experts else 64) * work.experts


def router_seconds(tokens: int, hidden: int, num_experts: int, machine: Machine, *, grouped: bool = False) -> Passes:
    """Returns the seconds of the router: a narrow matmul, float32 scores (read and written) and a top-k.

    The backward pass is two matmuls of the same bytes. A `grouped` choice takes three top-k: the best experts of each group,
    the groups, the experts. Each reads and writes float32 scores.
    """
    read = (ELEMENT * hidden + 4 * 3 * num_experts) * tokens / machine.hbm
    choices = 3 if grouped else 1
    forward = read + (choices - 1) * 4 * 2 * num_experts * tokens / machine.hbm + choices * tokens * machine.top_k
    return Passes(forward, forward, 2 * read)


def matmul_seconds(tokens: int, weights: float, machine: Machine, *, frozen: bool = False) -> Passes:
    """Returns the seconds of projections with `weights` weights: 2 FLOPs per weight and token forward, 4 backward.

    Frozen weights take 2 backward.
    """
    forward = 2 * tokens * weights / machine.dense_matmul
    return Passes(forward, forward, forward if frozen else 2 * forward)


def elementwise_seconds(tokens: int, elements: float, machine: Machine) -> Passes:
    """Returns the seconds to read or write `elements` elements of each token; twice that backward."""
    forward = ELEMENT * elements * tokens / machine.hbm
    return Passes(forward, forward, 2 * forward)
