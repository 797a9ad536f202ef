"""Seconds of a device's computation in one layer: experts, router, projections, attention and elementwise work.

Passes and letters follow docs/kernels.md: K choices a token, R rows (choices that this device's experts compute), D hidden, I
intermediate.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.config import HeadsSpec, Stage
from moe_jax.cost.flops import stage_weights
from moe_jax.cost.machine import Machine
from moe_jax.cost.memory import kept_by_layer, quantised_layer
from moe_jax.cost.parameters import BYTES, ELEMENT
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.kernels.vocabulary import CHUNK_TOKENS
from moe_jax.models.precision import PrecisionName
from moe_jax.models.remat import KeptPart


class Passes(NamedTuple):
    """Seconds of the forward pass, of recomputation under remat (`again`), and of the backward pass itself."""

    forward: float
    again: float
    backward: float

    def total(self, remat: bool) -> float:
        """Returns the seconds of one layer in a training step; includes recomputation if `remat`."""
        return self.forward + self.backward + (self.again if remat else 0.0)

    def plus(self, *others: "Passes") -> "Passes":
        """Returns the elementwise sum with other `Passes`."""
        return Passes(*map(sum, zip(self, *others, strict=True)))


@dataclass(frozen=True)
class ExpertsWork:
    """The number and sizes of the matmuls that one device's experts compute in one layer."""

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


def layer_seconds(step: PlannedStep, number: int, machine: Machine) -> dict[str, Passes]:
    """Returns the seconds that a device computes in one layer of stage `number`, by part (attention, experts, ...)."""
    config, tokens, stage, frozen = step.config, step.tokens, step.stages[number], step.adapters is not None
    own = step.parameters_of_stages[number]
    attended = step.attended[stage.first_layer : stage.first_layer + stage.num_layers]
    hidden, dense_inter = config.hidden_size, config.intermediate_size
    if stage.sparse:
        dense_inter = step.experts.shared_intermediate_size
    of_stage = stage_weights(config, number)
    weights = (of_stage.total() - of_stage["experts"] - of_stage["router"]) / stage.num_layers
    # Two norms and two sums; the activation of a dense block; with shared experts the sum of both outputs.
    elements = (10 + (3 if stage.sparse and dense_inter else 0)) * hidden + step.mixer.moved_elements + 3 * dense_inter
    if step.is_module(stage):
        # Three more norms; the outputs of two are concatenated.
        elements += 8 * hidden
    elementwise = elementwise_seconds(tokens, elements, machine)
    if step.param_dtype == "float32":
        # Every pass casts its parameters: 4 bytes read and 2 written.
        cast = 6 * sum(p.own_size / p.layers for p in own) / machine.hbm
        elementwise = elementwise.plus(Passes(cast, cast, cast))
    if step.adapters is not None:
        # Separate passes over rows, limited by their reads and writes.
        moved = elementwise_seconds(tokens, step.adapters.moved_elements / config.num_hidden_layers, machine)
        made = sum(quantised_layer(step, number)) / machine.hbm
        elementwise = elementwise.plus(moved, Passes(made, 0.0, made))
    parts = {
        "projections": matmul_seconds(tokens, weights, machine, frozen=frozen),
        "attention": attention_seconds(tokens, sum(attended) / len(attended), step.mixer, machine),
        "elementwise": elementwise.plus(_rounding_seconds(step, number, machine)),
        "overhead": Passes(*(machine.layer_overhead,) * 3),
    }
    if stage.sparse:
        spec = step.experts
        router = router_seconds(tokens, hidden, spec.num_experts, machine, grouped=spec.rule.num_groups > 1)
        experts = experts_seconds(experts_work(step), machine, frozen=frozen, precision=step.precision)
        parts["experts"] = experts.plus(router)
    for part, name in (("attention", "attention"), ("experts", "experts"), ("router", "experts")):
        if part in step.keep and name in parts:
            parts[name] = parts[name].plus(Passes(0.0, -seconds_of_parts(step, number, machine)[part], 0.0))
    return parts | {"kept": _keeping_seconds(step, stage, parts.values(), machine)}


def seconds_of_parts(step: PlannedStep, number: int, machine: Machine) -> dict[KeptPart, float]:
    """Returns the seconds that a recomputed layer of stage `number` saves by each part of its residuals that it keeps."""
    stage = step.stages[number]
    attended = step.attended[stage.first_layer : stage.first_layer + stage.num_layers]
    keys = sum(attended) / len(attended)
    saved: dict[KeptPart, float] = {"attention": attention_seconds(step.tokens, keys, step.mixer, machine).again}
    if stage.sparse:
        frozen = step.adapters is not None
        saved["router"] = (3 if step.experts.rule.num_groups > 1 else 1) * step.tokens * machine.top_k
        saved["experts"] = experts_seconds(experts_work(step), machine, frozen=frozen, precision=step.precision).again
    return saved


def experts_work(step: PlannedStep) -> ExpertsWork:
    """Returns the work of the experts on the busiest device, in one layer and micro-batch."""
    spec, own_experts = step.experts, step.experts.num_experts // step.mesh.expert
    sizes = step.config.hidden_size, spec.moe_intermediate_size
    return ExpertsWork(step.received, spec.num_experts_per_tok, step.busiest, own_experts, *sizes)


def experts_seconds(work: ExpertsWork, machine: Machine, *, frozen: bool = False, precision: PrecisionName = "bf16") -> Passes:
    """Returns the predicted seconds of the experts in one layer with backend `mosaic`, whose kernels run one after another.

    A matmul computes whole tiles of 128 rows, or of 64 rows where experts have at most 64 on average. The last tile of an
    expert is half empty on average. If reading the weights takes longer than the FLOPs, that time counts. Frozen weights have
    no gradients, and their backward pass gathers no rows of x. In FP8 operands have 1 byte, except for weight gradients.
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
    # A token is read once and its rows are written. XLA's combine reads these rows. For choices of other devices it rereads one
    # row, in half the time (profile of a layer over four GPUs). The first of two forward passes under remat gathers inside
    # gate_up only. The gather is counted anyway: it is 1 % of a layer.
    gather = ELEMENT * work.hidden * (work.tokens + work.rows) / machine.hbm
    rounded = work.hidden * (ELEMENT * work.tokens + work.rows) / machine.hbm if in_fp8 else gather
    elsewhere = work.tokens * work.choices - work.rows
    combine = gather + ELEMENT * work.hidden * elsewhere / 2 / machine.hbm
    # A gather of dy, d_act, dx and its sum; then dw_down, dw_gate_up and the gather of x. In FP8 the weight gradients gather dy
    # once more.
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
    """Returns the extra seconds of kernels that accumulate weight gradients in float32, compared with their matmuls alone.

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

    The backward pass is two matmuls of the same bytes. A `grouped` choice needs three top-k: the best experts of each group,
    the groups, the experts. Each reads and writes float32 scores.
    """
    read = (ELEMENT * hidden + 4 * 3 * num_experts) * tokens / machine.hbm
    choices = 3 if grouped else 1
    forward = read + (choices - 1) * 4 * 2 * num_experts * tokens / machine.hbm + choices * tokens * machine.top_k
    return Passes(forward, forward, 2 * read)


def matmul_seconds(tokens: int, weights: float, machine: Machine, *, frozen: bool = False) -> Passes:
    """Returns the seconds of dense projections with `weights` elements: 2 FLOPs per element and token forward, 4 backward.

    Frozen weights cost 2 backward.
    """
    forward = 2 * tokens * weights / machine.dense_matmul
    return Passes(forward, forward, forward if frozen else 2 * forward)


def attention_seconds(tokens: int, keys: float, mixer: HeadsSpec, machine: Machine) -> Passes:
    """Returns the seconds of the attention kernels, forward and backward.

    Args:
      tokens: queries.
      keys: mean number of keys that a query attends to.
    """
    forward = tokens * mixer.flops(keys) / machine.attention_forward
    rate = machine.attention_backward if mixer.key_dim <= 128 else machine.attention_backward_wide
    return Passes(forward, forward, tokens * mixer.backward_flops(keys) / rate)


def expansion_seconds(tokens: int, mixer: HeadsSpec, machine: Machine) -> Passes:
    """Returns the seconds to expand latents to the keys and values of all heads; 0 without latents.

    This is a matmul, whose result is read once and written as keys and values.
    """
    matmul = matmul_seconds(tokens, math.prod(mixer.expansion), machine)
    move = ELEMENT * tokens * (mixer.expansion[0] + mixer.expanded_elements) / machine.hbm
    return Passes(matmul.forward + move, matmul.again + move, matmul.backward + 2 * move)


def vocabulary_seconds(tokens: float, vocab: int, hidden: int, machine: Machine, *, frozen: bool = False) -> Passes:
    """Returns the seconds of the cross-entropy over the vocabulary: one matmul for the logits and two for gradients.

    The float32 logits are written and read forward, and once more for the gradients. The float32 gradient of the weights is
    read and written for each chunk of tokens; frozen weights have none.
    """
    matmul = 2 * tokens * vocab * hidden / machine.vocabulary
    chunks = math.ceil(tokens / CHUNK_TOKENS)
    forward = matmul + 8 * tokens * vocab / machine.hbm
    if frozen:
        return Passes(forward, forward, matmul + 4 * tokens * vocab / machine.hbm)
    return Passes(forward, forward, 2 * matmul + (4 * tokens + 8 * chunks * hidden) * vocab / machine.hbm)


def elementwise_seconds(tokens: int, elements: float, machine: Machine) -> Passes:
    """Returns the seconds to read or write `elements` elements per token forward, and twice that backward."""
    forward = ELEMENT * elements * tokens / machine.hbm
    return Passes(forward, forward, 2 * forward)


def _rounding_seconds(step: PlannedStep, number: int, machine: Machine) -> Passes:
    """Returns the seconds that the passes of one layer of a stage spend on rounding experts' matrices to FP8."""
    forward = again = backward = 0.0
    for p in step.parameters_of_stages[number]:
        if p.fp8 == "pass":
            rounded = (ELEMENT + 1) * p.used_size / p.layers
            forward, again, backward = forward + rounded, again + rounded, backward + rounded
        elif p.fp8 == "arrives":
            # The backward pass and its recomputation share one gather, and round the device's own part once.
            rounded = (BYTES[step.param_dtype] + 1) * p.own_size / p.layers
            forward, backward = forward + rounded, backward + rounded
        if p.fp8 and p.fp8 != "once":
            backward += 2 * p.used_size / p.layers
    return Passes(forward / machine.hbm, again / machine.hbm, backward / machine.hbm)


def _keeping_seconds(step: PlannedStep, stage: Stage, computing: Iterable[Passes], machine: Machine) -> Passes:
    """Returns the seconds to copy a layer's residuals into the stack of all layers (`layers/passes.py`) and out of it.

    Copies to and from host memory overlap with the layer's computation; only the excess counts. A pipe copies a chunk's layers
    back before it computes, in some ticks during the loss: these copies count in full.
    """
    size = kept_by_layer(step, stage)
    if step.remat != "offload":
        copy = 2 * size / machine.hbm
        return Passes(copy, 0.0, copy)
    copy = size / machine.host_link
    forward, again, backward = (sum(seconds) for seconds in zip(*computing, strict=True))
    hidden = 0.0 if step.offloads_slots else again + backward
    return Passes(max(0.0, copy - forward), 0.0, max(0.0, copy - hidden))
