"""Computes the experts of a Mixture-of-Experts layer that are split over a mesh axis: `kernels.experts_mlp` on each device.

The exchange takes place in rounds. The first round has room for an even routing times `capacity_factor`. Tokens beyond that
queue for further rounds, until the longest queue of any device is empty. An even routing needs no further round. If every
choice falls on one device, it needs about n / `capacity_factor` of them. So no token is ever lost, and no buffer is sized for
the worst routing.

A `capacity_factor` of n makes buffers that hold the worst routing. Then there are no further rounds, and the host need not
wait to learn their number.

The first round saves the residuals that `experts_mlp` saves. The number of further rounds depends on the routing, so they save
nothing, and the backward pass computes them again. Choices of shadow experts (`shadow`) take no part in the exchange.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.kernels.experts.api import experts_mlp
from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.experts import Fp8Matrices, experts_mlp_in_fp8, matrices_of
from moe_jax.kernels.experts.fp8.passes import QuantisedExperts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fp8.rounded import RoundedWeights, weights_and_copies, with_copies
from moe_jax.kernels.experts.fp8.rounded_tokens import RoundedTokens
from moe_jax.kernels.experts.fused_vjp import Matrices
from moe_jax.kernels.experts.internal import (
    Accumulators,
    TokenPart,
    experts_mlp_accumulating,
    experts_mlp_of_parts,
)
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import check_experts_mlp
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.expert import pairwise
from moe_jax.parallel.expert.dispatch_fp8 import dispatch_in_fp8
from moe_jax.parallel.expert.exchange import combine, dispatch
from moe_jax.parallel.expert.routes import (
    Queues,
    Route,
    first_route,
    further_rounds,
    further_route,
    in_first_round,
    owners,
    queue,
)
from moe_jax.parallel.expert.settings import (
    Capacity,
    ExpertParallel,
    Transport,
    TransportName,
    devices_of_step,
    first_capacity,
    further_capacity,
)
from moe_jax.parallel.expert.shadow import (
    ExpertWeights,
    choices_of_shadows,
    lend,
    load_by_device,
    rows_per_shadow,
    select_shadows,
)
from moe_jax.parallel.mesh import axis_size


class Exchange(NamedTuple):
    """Counts of one exchange on this device. They differ between the devices of the axis unless they are summed over it."""

    num_dropped: Int[Array, ""]
    """Choices of this device's tokens that no expert computed, because a buffer was full; 0 unless `drop` is set."""
    num_rounds: Int[Array, ""]
    """Rounds of the exchange: 1 plus the further rounds. All devices of the axis have the same number."""
    num_shadows: Int[Array, ""]
    """Experts that were copied to all devices of the axis; 0 unless `shadow_experts` is set.

    All devices have the same number, although its type under `check_vma` says that it may vary.
    """


def expert_parallel_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "*layers local_experts 2*inter hidden"] | RoundedWeights | QuantisedMatrices,
    w_down: Float[Array, "*layers local_experts hidden inter"] | RoundedWeights | QuantisedMatrices,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    parallel: ExpertParallel,
    *,
    backend: str | None = None,
    accumulators: Accumulators | None = None,
    layer: Int[Array, ""] | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Computes `experts_mlp` of this device's tokens with the experts of all n devices of the axis, inside `jax.shard_map`.

    Each device passes its own tokens, their choices among all E experts, and the weights of its own E/n experts. Every device
    of the axis must call it with the same number of tokens.

    Differentiable in x, both weights and topk_weights. The gradient of a device's expert weights is the sum over the tokens of
    all devices. Each device sums its experts' outputs for a token in f32, and sends that sum in x's dtype. The token's own
    device sums the devices' contributions in f32. Two runs give the same bits.

    Ids outside [0, E) add nothing, as in `experts_mlp`. A token may choose an expert twice. On an axis of one device nothing
    travels and nothing is dropped.

    Args:
        accumulators: of this device's experts, as in `kernels.experts.internal.experts_mlp_accumulating`.
        layer: the weights are stacks of layers, of which the call uses this one; kernels read them in place. They are frozen.
        w_gate_up, w_down: this device's experts; with `precision` both may have been rounded before. `QuantisedMatrices` are
            frozen: they get no gradients.
        precision: as in `experts_mlp`. Outputs travel in x's dtype, and so do tokens without `parallel.tokens_in_fp8`.

    Raises:
        ValueError: shapes that do not fit together, more shadow_experts than experts, and errors of `experts_mlp`. Shadow
            experts with accumulators, rounded or frozen weights. Tokens or weights in FP8 without a precision.
        NameError: outside `shard_map`, or inside one whose mesh lacks the axis.
        NotImplementedError: shadow_experts under `jax.vmap`.
    """
    matrices_of(w_gate_up, w_down)  # refuses one of each kind
    (w_gate_up, w_down), quantised = weights_and_copies(w_gate_up, w_down)
    held = HeldExperts(w_gate_up, w_down, layer if accumulators is None else accumulators.layer)
    is_frozen = layer is not None or held.is_in_fp8
    experts_axes = "local_experts" if held.layer is None else "layers local_experts"
    sizes = check_experts_mlp(x, *held.arrays, topk_weights, topk_experts, experts=experts_axes)
    if held.is_in_fp8 and precision is None:
        raise ValueError("QuantisedMatrices are multiplied in FP8: give precision=Precision(); got precision=None")
    if parallel.tokens_in_fp8 and precision is None:
        raise ValueError(
            "tokens_in_fp8=True sends tokens as experts in FP8 multiply them: give precision=Precision(), or set_precision of "
            "the model; got precision=None"
        )
    if precision is not None:
        resolve_fp8_backend(backend, x.dtype, sizes["hidden"], sizes["inter"])
    devices = axis_size(parallel.axis_name)
    num_experts = devices * held.num_experts
    if parallel.shadow_experts and accumulators is not None:
        raise ValueError("shadow_experts move experts' gradients between devices, which accumulators cannot: take one of both")
    if parallel.shadow_experts and (quantised is not None or is_frozen):
        raise ValueError("shadow_experts copy weights to all devices, which must not be rounded or frozen: take one of both")
    if parallel.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts must be at most the {num_experts} experts; got {parallel.shadow_experts}")
    arguments = x, w_gate_up, w_down, topk_weights, topk_experts
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if topk_experts.size == 0:
        return vary_as(jnp.zeros_like(x), arguments), Exchange(none, one, none)
    if devices == 1:
        given: dict[str, Any] = dict(backend=backend)
        if is_frozen:
            part = TokenPart(x, topk_weights, topk_experts)
            (y,) = experts_mlp_of_parts([part], w_gate_up, w_down, layer=layer, precision=precision, **given)
        elif precision is None:
            y = experts_mlp_accumulating(x, w_gate_up, w_down, topk_weights, topk_experts, accumulators, **given)
        else:
            matrices, given = Fp8Matrices(Matrices(w_gate_up, w_down), quantised), given | {"accumulators": accumulators}
            y = experts_mlp_in_fp8(x, matrices, topk_weights, topk_experts, precision, **given)
        return y, Exchange(none, one, none)

    experts = int32_ids(topk_experts, num_experts)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1)
    is_held = is_frozen or accumulators is not None
    sums = None if accumulators is None else Matrices(accumulators.gate_up, accumulators.down)
    gate_up, down = (None, None) if is_held else held.arrays
    inputs = ExpertInputs(x, gate_up, down, topk_weights, sums)
    everywhere = arguments, lax.axis_index(parallel.axis_name)
    inputs, experts, held, quantised = vary_as((inputs, experts, held, quantised), everywhere)
    if parallel.shadow_experts == 0:
        y, exchange = _exchange(parallel, backend, precision, inputs, experts, held if is_held else None, quantised)
        return y.astype(x.dtype), exchange
    shadows = _compute_shadows(parallel, backend, precision, inputs, experts)
    y, exchange = _exchange(parallel, backend, precision, shadows.inputs, shadows.experts)
    return (y + shadows.y).astype(x.dtype), exchange._replace(num_shadows=shadows.num_shadows)


class ExpertInputs(NamedTuple):
    """The differentiable arguments of `expert_parallel_mlp`, on one device."""

    x: Float[Array, "tokens hidden"]
    w_gate_up: Float[Array, "local_experts 2*inter hidden"] | None
    w_down: Float[Array, "local_experts hidden inter"] | None
    weights: Float[Array, "tokens k"]
    sums: Matrices | None = None
    """The sums to which the weights' gradients are added; the weights are then not among the inputs."""


class HeldExperts(NamedTuple):
    """Weights without gradients of their own: `ExpertInputs.sums` has their gradients, or they are frozen."""

    w_gate_up: Float[Array, "*layers local_experts 2*inter hidden"] | QuantisedMatrices
    w_down: Float[Array, "*layers local_experts hidden inter"] | QuantisedMatrices
    layer: Int[Array, ""] | None
    """As in `kernels.experts.internal.Accumulators`."""

    @property
    def is_in_fp8(self) -> bool:
        """True for weights that are nothing but their FP8 values and scales."""
        return isinstance(self.w_gate_up, QuantisedMatrices)

    @property
    def arrays(self) -> Matrices:
        """Arrays of the weights' shapes."""
        matrices = self.w_gate_up, self.w_down
        return Matrices(*(w.values if isinstance(w, QuantisedMatrices) else w for w in matrices))

    @property
    def num_experts(self) -> int:
        """The number of this device's experts."""
        return self.arrays.down.shape[-3]


class ShadowOutput(NamedTuple):
    """The outputs of shadow experts, and the choices that are left for the exchange."""

    y: Float[Array, "tokens hidden"]
    """The shadows' contribution to this device's tokens."""
    num_shadows: Int[Array, ""]
    inputs: ExpertInputs
    """The inputs of the exchange. The gradients of the shadows' copies flow into these weights."""
    experts: Int[Array, "tokens k"]
    """The choices, -1 where a shadow computed them."""


def _compute_shadows(
    parallel: ExpertParallel,
    backend: str | None,
    precision: Precision | None,
    inputs: ExpertInputs,
    experts: Int[Array, "tokens k"],
) -> ShadowOutput:
    assert inputs.w_gate_up is not None and inputs.w_down is not None
    axis_name, num_experts = parallel.axis_name, axis_size(parallel.axis_name) * inputs.w_down.shape[0]
    dtype = inputs.x.dtype
    load = load_by_device(experts, num_experts, axis_name)
    cost = rows_per_shadow(parallel.flops_per_byte, dtype.itemsize, load.shape[0])
    shadows = select_shadows(load, parallel.shadow_experts, cost)
    own, copies = lend(ExpertWeights(inputs.w_gate_up, inputs.w_down), shadows, axis_name, dtype)
    weights_of_shadows, slots, others = choices_of_shadows(inputs.weights, experts, shadows)
    options: dict[str, Any] = dict(backend=backend, precision=precision)
    y = experts_mlp(inputs.x, copies.gate_up, copies.down, weights_of_shadows, slots, **options)
    left = inputs._replace(w_gate_up=own.gate_up, w_down=own.down)
    return ShadowOutput(y, jnp.sum(shadows >= 0, dtype=jnp.int32), left, others)


def _exchange(
    parallel: ExpertParallel,
    backend: str | None,
    precision: Precision | None,
    inputs: ExpertInputs,
    experts: Int[Array, "tokens k"],
    held: HeldExperts | None = None,
    quantised: QuantisedExperts | None = None,
) -> tuple[Array, Exchange]:
    """Returns what the experts of all devices add to this device's tokens, in at least f32, and the counts."""
    devices, tokens = axis_size(parallel.axis_name), inputs.x.shape[0]
    local_experts = _held_by(inputs, held).num_experts
    plan = plan_exchange(tokens, experts.shape[1], devices, local_experts, parallel, backend)
    plan = plan._replace(precision=precision, tokens_in_fp8=parallel.tokens_in_fp8)
    owner = owners(experts, plan.num_experts, devices)
    queues = queue(owner, lax.stop_gradient(inputs.weights), devices, plan.first, parallel.drop or "position")
    # A buffer holds everything that one device can send to another, under any routing.
    holds_all = plan.first == (tokens, experts.size)
    is_first = owner >= 0 if holds_all else in_first_round(queues, owner)
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if parallel.drop is not None or holds_all:
        y = _first_round(plan, Choices(none, queues, is_first, experts, held, quantised), inputs)
        return y, Exchange(jnp.sum((owner >= 0) & ~is_first, dtype=jnp.int32), one, none)
    rounds = further_rounds(queues, plan.further, parallel.axis_name)
    y = _all_rounds(plan, Choices(rounds, queues, is_first, experts, held, quantised), inputs)
    return y, Exchange(none, 1 + rounds, none)


class ExchangePlan(NamedTuple):
    """The facts of a call that are known when it is traced."""

    axis_name: str
    devices: int
    num_experts: int
    transport: TransportName | Transport
    group_size: int | None
    first: Capacity
    further: Capacity
    backend: str | None
    precision: Precision | None = None
    tokens_in_fp8: bool = False


class Choices(NamedTuple):
    """The arrays of a call without gradients: the chosen expert of each choice, and the round that computes it."""

    rounds: Int[Array, ""]
    """The number of further rounds."""
    queues: Queues
    is_first: Bool[Array, "tokens k"]
    """True for a choice that the first round computes."""
    experts: Int[Array, "tokens k"]
    """Ids among all experts; -1 for a choice that the exchange does not compute."""
    held: HeldExperts | None
    """The weights, where their gradients are added to sums or where they are frozen."""
    quantised: QuantisedExperts | None = None
    """The weights' values, where they are `RoundedWeights`."""


def plan_exchange(
    tokens: int, k: int, devices: int, local_experts: int, parallel: ExpertParallel, backend: str | None
) -> ExchangePlan:
    """Chooses the transport and the sizes of the buffers for a call with these numbers of tokens, choices and experts."""
    num_experts = local_experts * devices
    first = first_capacity(tokens, k, num_experts, devices, parallel.capacity_factor)
    transport = parallel.transport or ("gather" if first.tokens == tokens else "all_to_all")
    if transport == "gather" and parallel.drop is None:
        first = first._replace(tokens=tokens)
    further = further_capacity(first, k)
    return ExchangePlan(parallel.axis_name, devices, num_experts, transport, parallel.group_size, first, further, backend)


def _first_round(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs) -> Array:
    # A gather brings the tokens of all rounds: without the mask it would compute choices of further rounds twice.
    experts = jnp.where(choices.is_first, choices.experts, -1)
    route = first_route(choices.queues, plan.first)
    return _round(plan, route, plan.first, plan.transport, choices._replace(experts=experts), inputs)


def _further_round(plan: ExchangePlan, choices: Choices, index: Int[Array, ""], inputs: ExpertInputs) -> Array:
    # Groups of other mesh axes may run another number of rounds. `all_to_all` within a group allows that, `ppermute` does not.
    route = further_route(choices.queues, index, plan.further)
    return _round(plan, route, plan.further, "all_to_all", choices, inputs)


def _round(
    plan: ExchangePlan,
    route: Route,
    capacity: Capacity,
    transport: TransportName | Transport,
    of_call: Choices,
    inputs: ExpertInputs,
) -> Float[Array, "tokens hidden"]:
    """Returns the outputs of the tokens on `route`, in at least f32; 0 for the other tokens."""
    x, weights, sums, experts = inputs.x, inputs.weights, inputs.sums, of_call.experts
    held = _held_by(inputs, of_call.held)
    w_gate_up, w_down = held.w_gate_up, held.w_down
    is_frozen = of_call.held is not None and sums is None
    steps: tuple[int, ...] = (plan.devices,)
    shares: tuple[int, ...] = (1,)
    if transport == "pairwise":
        steps = shares = _devices_per_step(plan)
        if sums is None and not is_frozen:
            x, w_down = _with_gradients_together(x, w_down)
        elif sums is not None:
            x, sums_of_down = _with_gradients_together(x, sums.down)
            sums = sums._replace(down=sums_of_down)
    how, k = (plan.axis_name, transport, steps), weights.shape[1]
    # Weights and ids travel as one array: f32 holds every id exactly. An id travels as id + 1, since an empty slot holds 0.
    wide = at_least_f32(weights.dtype)
    choices = jnp.concatenate([weights.astype(wide), (experts + 1).astype(wide)], axis=1)
    if len(steps) > 2:
        # The second step needs all choices. As peer-to-peer copies they would queue behind the copies of all tokens.
        sends_all = pairwise.sends_all(route)
        arrived = dispatch(choices, route, plan.axis_name, "gather" if sends_all else "all_to_all")
        own, *others = pairwise.by_distance(arrived, plan.axis_name)
        # Tokens leave behind the choices, since copies queue in the order of their start.
        x, others = _when_arrived(x, others)
        choices = jnp.concatenate([choices if sends_all else own, *others])
    else:
        choices = dispatch(choices, route, *how)
        if plan.tokens_in_fp8:
            # Without the order two CPU devices gave wrong sums, or hung, where "gather" had further rounds.
            x, (choices,) = _when_arrived(x, [choices])
    tokens = dispatch_in_fp8(x, route, *how) if plan.tokens_in_fp8 else dispatch(x, route, *how)
    first_expert = lax.axis_index(plan.axis_name).astype(jnp.int32) * held.num_experts

    def part(tokens: Array | RoundedTokens, choices: Array) -> TokenPart:
        # Computed for each step alone: one computation for all steps would make each wait for the last choices.
        return TokenPart(tokens, choices[:, :k], choices[:, k:].astype(jnp.int32) - 1 - first_expert)

    ends = list(itertools.accumulate(step * (tokens.shape[0] // plan.devices) for step in steps[:-1]))
    of_steps = tokens.split(ends) if isinstance(tokens, RoundedTokens) else jnp.split(tokens, ends)
    parts = list(map(part, of_steps, jnp.split(choices, ends)))
    max_pairs = [step * capacity.pairs for step in steps]
    accumulators = None
    if sums is not None:
        accumulators = Accumulators(*sums, in_stack=True, layer=held.layer)
    outputs = experts_mlp_of_parts(
        parts,
        *with_copies((w_gate_up, w_down), of_call.quantised),
        accumulators,
        layer=held.layer if is_frozen else None,
        backend=plan.backend,
        max_pairs=max_pairs,
        shares=shares,
        precision=plan.precision,
    )
    return combine(jnp.concatenate(outputs), route, *how)


def _held_by(inputs: ExpertInputs, held: HeldExperts | None) -> HeldExperts:
    """Returns this device's experts, whether they are among the inputs or not."""
    if held is not None:
        return held
    assert inputs.w_gate_up is not None and inputs.w_down is not None
    return HeldExperts(inputs.w_gate_up, inputs.w_down, None)


@jax.custom_vjp
def _when_arrived(x: Array, arrived: list[Array]) -> tuple[Array, list[Array]]:
    """Returns both unchanged; x is ready after `arrived`. Their gradients do not wait for each other."""
    return lax.optimization_barrier((x, arrived))


_when_arrived.defvjp(
    lambda x, arrived: (_when_arrived(x, arrived), None),
    lambda _, gradients: gradients,
)  # fmt: skip


@jax.custom_vjp
def _with_gradients_together(x: Array, w_down: Array) -> tuple[Array, Array]:
    """Returns both unchanged; their gradients are ready together. The second may be the sums that w_down's gradient goes to.

    The last of x's gradient travels home beside the computation of w_down's gradient. Without the barrier XLA would compute
    the latter later.
    """
    return x, w_down


_with_gradients_together.defvjp(
    lambda x, w_down: ((x, w_down), None),
    lambda _, gradients: lax.optimization_barrier(gradients),
)


def _devices_per_step(plan: ExchangePlan) -> tuple[int, ...]:
    """Returns the number of devices whose tokens each "pairwise" step computes: this device alone, then groups of others."""
    at_once = plan.group_size or devices_of_step(plan.first)
    return 1, *(min(at_once, plan.devices - first) for first in range(1, plan.devices, at_once))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs) -> Array:
    y = _first_round(plan, choices, inputs)
    return _add_further_rounds(plan, choices, inputs, y)


class _RoundsResiduals(NamedTuple):
    pullback: Any
    choices: Choices
    inputs: ExpertInputs


def _all_rounds_forward(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs):
    def first(*inputs: Any) -> Array:
        return _first_round(plan, choices, ExpertInputs(*inputs))

    # The pullback saves no arguments: the residuals below hold each of them once, not once per use.
    y, pullback = jax.vjp(first, *inputs, saveable_args=(False,) * len(inputs))
    y = _add_further_rounds(plan, choices, inputs, y)
    return y, _RoundsResiduals(pullback, choices, inputs)


class _OutputState(NamedTuple):
    round_index: Int[Array, ""]
    """The next further round, counted from 0."""
    y: Float[Array, "tokens hidden"]


def _add_further_rounds(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs, y: Array) -> Array:
    def add(state: _OutputState) -> _OutputState:
        return _OutputState(state.round_index + 1, state.y + _further_round(plan, choices, state.round_index, inputs))

    return lax.while_loop(lambda state: state.round_index < choices.rounds, add, _OutputState(jnp.zeros((), jnp.int32), y)).y


class _GradientState(NamedTuple):
    round_index: Int[Array, ""]
    """The next further round, counted from 0."""
    sums: ExpertInputs
    """The gradients of all rounds so far, in at least f32. `ExpertInputs.sums` has those of the weights added."""


def _all_rounds_backward(plan: ExchangePlan, residuals: _RoundsResiduals, dy: Array) -> tuple[None, ExpertInputs]:
    pullback, choices, inputs = residuals
    gradients = ExpertInputs(*pullback.replace(args_res=list(inputs))(dy))

    def add_further_rounds(gradients: ExpertInputs) -> ExpertInputs:
        def add(state: _GradientState) -> _GradientState:
            before = state.sums.sums
            of_inputs = inputs if before is None else inputs._replace(sums=before)
            (of_round,) = jax.vjp(partial(_further_round, plan, choices, state.round_index), of_inputs)[1](dy)
            own, others = (each._replace(sums=None) for each in (state.sums, of_round))
            return _GradientState(state.round_index + 1, jax.tree.map(jnp.add, own, others)._replace(sums=of_round.sums))

        start = _GradientState(jnp.zeros((), jnp.int32), jax.tree.map(widened, gradients))
        sums = lax.while_loop(lambda state: state.round_index < choices.rounds, add, start).sums
        return jax.tree.map(lambda total, a: total.astype(a.dtype), sums, gradients)

    # The branch without further rounds allocates no f32 accumulators.
    gradients = lax.cond(choices.rounds > 0, add_further_rounds, lambda gradients: gradients, gradients)
    return None, gradients


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)
