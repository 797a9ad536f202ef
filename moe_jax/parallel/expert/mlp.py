"""The experts of a Mixture-of-Experts layer, split over a mesh axis: `kernels.experts_mlp` where the experts live.

The first round of the exchange carries what an even routing brings and some more. What is beyond queues for further rounds, as
many as the longest queue of any device needs: none under an even routing, n / `capacity_factor` where all choices fall on one
device. So no token is ever lost
and no buffer is made for the worst routing. Where one holds it all the same (`capacity_factor` of n) there are no further
rounds, and the host need not wait to learn how many.

The first round keeps for backward what `experts_mlp` keeps; a further one, whose number only the routing knows, keeps nothing
and is computed again. Choices of shadow experts (`shadow`) take no part in the exchange.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.api import experts_mlp
from moe_jax.kernels.experts.internal import TokenPart, experts_mlp_of_parts
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import check_experts_mlp
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.expert import pairwise
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
    devices_of_step,
    first_capacity,
    further_capacity,
)
from moe_jax.parallel.expert.shadow import choices_of_shadows, lend, load_by_device, rows_per_shadow, select_shadows
from moe_jax.parallel.mesh import axis_size


class Exchange(NamedTuple):
    """What an exchange did, of this device: differs between the devices of the axis unless summed over it."""

    num_dropped: Int[Array, ""]
    """Choices of this device's tokens that no expert computed, for lack of room; 0 unless `drop` is set."""
    num_rounds: Int[Array, ""]
    """Rounds of the exchange, the same on all devices of the axis: 1 and the further ones."""
    num_shadows: Int[Array, ""]
    """Experts that were copied to all devices of the axis: the same number on each of them, though its type, which says that it
    may vary, does not know it. 0 unless `shadow_experts` is set."""


def expert_parallel_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "local_experts 2*inter hidden"],
    w_down: Float[Array, "local_experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Int[Array, "tokens k"],
    parallel: ExpertParallel,
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """`experts_mlp` of this device's tokens with the experts of all devices of the axis; call it inside `jax.shard_map`.

    Each device passes its own tokens with their choices among all E experts, and the weights of its own E/n experts. Every
    device of the axis must call it, with as many tokens. Differentiable in x, both weights and topk_weights; a device's
    gradient of its experts' weights is the sum over the tokens of all devices. A token's outputs of one device are summed in
    f32 there and travel in x's dtype; those of the devices are summed in f32. Two runs give the same bits.

    Ids outside [0, E) add nothing, as in `experts_mlp`; a token may choose an expert twice. On an axis of one device nothing
    travels and nothing is dropped.

    Raises:
        ValueError: shapes that do not fit together, more shadow_experts than experts, and what `experts_mlp` raises.
        NameError: outside `shard_map`, or one whose mesh lacks the axis.
        NotImplementedError: shadow_experts under `jax.vmap`.
    """
    check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, experts="local_experts")
    devices = axis_size(parallel.axis_name)
    num_experts = devices * w_gate_up.shape[0]
    if parallel.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts must be at most the {num_experts} experts; got {parallel.shadow_experts}")
    arrays = x, w_gate_up, w_down, topk_weights, topk_experts
    if devices == 1 or topk_experts.size == 0:
        y = experts_mlp(*arrays, backend=backend) if topk_experts.size else vary_as(jnp.zeros_like(x), arrays)
        return y, Exchange(jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32))

    experts = int32_ids(topk_experts, num_experts)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1)
    arrays = vary_as((*arrays[:-1], experts), (arrays, lax.axis_index(parallel.axis_name)))
    if parallel.shadow_experts == 0:
        y, num_dropped, num_rounds = _exchange(parallel, backend, *arrays)
        return y.astype(x.dtype), Exchange(num_dropped, num_rounds, jnp.zeros((), jnp.int32))
    y_of_shadows, num_shadows, arrays = _shadows(parallel, backend, *arrays)
    y, num_dropped, num_rounds = _exchange(parallel, backend, *arrays)
    return (y + y_of_shadows).astype(x.dtype), Exchange(num_dropped, num_rounds, num_shadows)


def _shadows(
    parallel: ExpertParallel, backend: str | None, x: Array, w_gate_up: Array, w_down: Array, weights: Array, experts: Array
) -> tuple[Array, Array, tuple]:
    """What shadows add to this device's tokens, how many they are, and the arguments of an exchange of the other choices."""
    axis_name, num_experts = parallel.axis_name, axis_size(parallel.axis_name) * w_down.shape[0]
    load = load_by_device(experts, num_experts, axis_name)
    cost = rows_per_shadow(parallel.flops_per_byte, x.dtype.itemsize, load.shape[0])
    shadows = select_shadows(load, parallel.shadow_experts, cost)
    (w_gate_up, w_down), copies = lend((w_gate_up, w_down), shadows, axis_name, x.dtype)
    weights_of_shadows, slots, others = choices_of_shadows(weights, experts, shadows)
    y = experts_mlp(x, *copies, weights_of_shadows, slots, backend=backend)
    return y, jnp.sum(shadows >= 0, dtype=jnp.int32), (x, w_gate_up, w_down, weights, others)


def _exchange(
    parallel: ExpertParallel, backend: str | None, x: Array, w_gate_up: Array, w_down: Array, weights: Array, experts: Array
) -> tuple[Array, Array, Array]:
    """What the experts of all devices add to this device's tokens, num_dropped and num_rounds."""
    devices = axis_size(parallel.axis_name)
    plan = _plan(x.shape[0], experts.shape[1], devices, w_gate_up.shape[0], parallel, backend)
    owner = owners(experts, plan.num_experts, devices)
    queues = queue(owner, lax.stop_gradient(weights), devices, plan.first, parallel.drop or "position")
    holds_all = plan.first == (x.shape[0], experts.size)  # from one device for one other, whatever the routing
    is_first = owner >= 0 if holds_all else in_first_round(queues, owner)
    arrays = x, w_gate_up, w_down, weights
    if parallel.drop is not None or holds_all:
        y = _first_round(plan, queues, is_first, experts, *arrays)
        return y, jnp.sum((owner >= 0) & ~is_first, dtype=jnp.int32), jnp.ones((), jnp.int32)
    rounds = further_rounds(queues, plan.further, parallel.axis_name)
    y = _all_rounds(plan, rounds, queues, is_first, experts, *arrays)
    return y, jnp.zeros((), jnp.int32), 1 + rounds


class _Plan(NamedTuple):
    """What is known of a call when it is traced."""

    axis_name: str
    devices: int
    num_experts: int
    transport: Transport
    group_size: int | None
    first: Capacity
    further: Capacity
    backend: str | None


def _plan(tokens: int, k: int, devices: int, local_experts: int, parallel: ExpertParallel, backend: str | None) -> _Plan:
    num_experts = local_experts * devices
    first = first_capacity(tokens, k, num_experts, devices, parallel.capacity_factor)
    transport = parallel.transport or ("gather" if first.tokens == tokens else "all_to_all")
    if transport == "gather" and parallel.drop is None:
        first = first._replace(tokens=tokens)
    further = further_capacity(first, k)
    return _Plan(parallel.axis_name, devices, num_experts, transport, parallel.group_size, first, further, backend)


def _first_round(plan: _Plan, queues: Queues, is_first: Array, experts: Array, *arrays: Array) -> Array:
    # A gather brings the tokens of all rounds.
    experts = jnp.where(is_first, experts, -1)
    return _round(plan, first_route(queues, plan.first), plan.first, plan.transport, experts, *arrays)


def _further_round(plan: _Plan, queues: Queues, turn: Array, experts: Array, *arrays: Array) -> Array:
    # Devices beside this axis may take other numbers of rounds. That an `all_to_all` within groups allows, a `ppermute` not.
    return _round(plan, further_route(queues, turn, plan.further), plan.further, "all_to_all", experts, *arrays)


def _round(
    plan: _Plan,
    route: Route,
    capacity: Capacity,
    transport: Transport,
    experts: Int[Array, "tokens k"],
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "local_experts 2*inter hidden"],
    w_down: Float[Array, "local_experts hidden inter"],
    weights: Float[Array, "tokens k"],
) -> Float[Array, "tokens hidden"]:
    """The outputs of the tokens on `route`, in at least f32; 0 for the others."""
    steps: tuple[int, ...] = (plan.devices,)
    shares: tuple[int, ...] = (1,)
    if transport == "pairwise":
        steps = shares = _steps(plan)
        x, w_down = _with_gradients_together(x, w_down)
    how, k = (plan.axis_name, transport, steps), weights.shape[1]
    # Weights and ids travel as one array: floats of 32 bits hold every id exactly, and 0 is what an empty slot holds.
    wide = at_least_f32(weights.dtype)
    choices = jnp.concatenate([weights.astype(wide), (experts + 1).astype(wide)], axis=1)
    if len(steps) > 2:
        # The second step needs all choices: as hops they would queue behind those of all tokens, and so would a gather.
        sends_all = pairwise.sends_all(route)
        arrived = dispatch(choices, route, plan.axis_name, "gather" if sends_all else "all_to_all")
        own, *others = pairwise.by_distance(arrived, plan.axis_name)
        x, others = _when_arrived(x, others)
        choices = jnp.concatenate([choices if sends_all else own, *others])
    else:
        choices = dispatch(choices, route, *how)
    tokens = dispatch(x, route, *how)
    first_expert = lax.axis_index(plan.axis_name).astype(jnp.int32) * w_down.shape[0]

    def part(tokens: Array, choices: Array) -> TokenPart:
        # Of each step by itself: computed for all at once, no step would begin before the last choices are there.
        return TokenPart(tokens, choices[:, :k], choices[:, k:].astype(jnp.int32) - 1 - first_expert)

    ends = list(itertools.accumulate(step * (tokens.shape[0] // plan.devices) for step in steps[:-1]))
    parts = list(map(part, *(jnp.split(a, ends) for a in (tokens, choices))))
    max_pairs = [step * capacity.pairs for step in steps]
    outputs = experts_mlp_of_parts(parts, w_gate_up, w_down, backend=plan.backend, max_pairs=max_pairs, shares=shares)
    return combine(jnp.concatenate(outputs), route, *how)


@jax.custom_vjp
def _when_arrived(x: Array, arrived: list[Array]) -> tuple[Array, list[Array]]:
    """Both, x when the others have arrived; their gradients do not wait for each other."""
    return lax.optimization_barrier((x, arrived))


_when_arrived.defvjp(lambda *arrays: (_when_arrived(*arrays), None), lambda _, gradients: gradients)


@jax.custom_vjp
def _with_gradients_together(x: Array, w_down: Array) -> tuple[Array, Array]:
    """Both; x's gradient is there with w_down's, beside which the last of it travels home: XLA would compute that later."""
    return x, w_down


_with_gradients_together.defvjp(lambda *arrays: (arrays, None), lambda _, gradients: lax.optimization_barrier(gradients))


def _steps(plan: _Plan) -> tuple[int, ...]:
    """How many devices' tokens are computed together: its own alone, for which no device waits, then those of others."""
    at_once = plan.group_size or devices_of_step(plan.first)
    return 1, *(min(at_once, plan.devices - first) for first in range(1, plan.devices, at_once))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(plan: _Plan, rounds: Array, queues: Queues, is_first: Array, experts: Array, *arrays: Array) -> Array:
    y = _first_round(plan, queues, is_first, experts, *arrays)
    return _add_further_rounds(plan, rounds, queues, experts, arrays, y)


def _all_rounds_forward(plan: _Plan, rounds: Array, queues: Queues, is_first: Array, experts: Array, *arrays: Array):
    # The arguments are kept once, below, and not again for each use of theirs.
    first = partial(_first_round, plan, queues, is_first, experts)
    y, pullback = jax.vjp(first, *arrays, saveable_args=(False,) * len(arrays))
    y = _add_further_rounds(plan, rounds, queues, experts, arrays, y)
    return y, (pullback, rounds, queues, experts, arrays)


def _add_further_rounds(plan: _Plan, rounds: Array, queues: Queues, experts: Array, arrays: tuple, y: Array) -> Array:
    def add(state):
        turn, y = state
        return turn + 1, y + _further_round(plan, queues, turn, experts, *arrays)

    return lax.while_loop(lambda state: state[0] < rounds, add, (jnp.zeros((), jnp.int32), y))[1]


def _all_rounds_backward(plan: _Plan, kept: tuple, dy: Array) -> tuple:
    pullback, rounds, queues, experts, arrays = kept
    gradients = pullback.replace(args_res=list(arrays))(dy)

    def add_further_rounds(gradients):
        def add(state):
            turn, sums = state
            of_turn = jax.vjp(partial(_further_round, plan, queues, turn, experts), *arrays)[1](dy)
            return turn + 1, jax.tree.map(jnp.add, sums, of_turn)

        start = jnp.zeros((), jnp.int32), jax.tree.map(widened, gradients)
        sums = lax.while_loop(lambda state: state[0] < rounds, add, start)[1]
        return jax.tree.map(lambda total, a: total.astype(a.dtype), sums, gradients)

    # Without further rounds the gradients need no sums in f32 beside them.
    gradients = lax.cond(rounds > 0, add_further_rounds, lambda gradients: gradients, gradients)
    return None, None, None, None, *gradients


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)
