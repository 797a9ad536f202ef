"""Computes one round of the exchange: tokens are sent to their experts, experts compute, and outputs return.

With "pairwise" a round has steps: a device computes its own tokens, then the tokens of one group of other devices at a time. So
tokens and outputs travel while other steps' experts compute. Any other transport has one step for all devices' tokens.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.experts.activation import SILU
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.fp8.quantise import RoundedTokens
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights
from moe_jax.kernels.precision import at_least_f32
from moe_jax.parallel.expert import pairwise
from moe_jax.parallel.expert.exchange import combine, dispatch, dispatch_in_fp8
from moe_jax.parallel.expert.routes import Queues, Route, first_route, further_route
from moe_jax.parallel.expert.settings import Capacity, ExchangePlan, Transport, TransportName, devices_per_step


class ExpertInputs(NamedTuple):
    """The differentiated inputs of expert parallelism: tokens, expert weights and routing weights."""

    x: Float[Array, "tokens hidden"]
    trained: ExpertWeights
    """`ExpertWeights.trained` of this device's experts."""
    weights: Float[Array, "tokens k"]
    """The weight of each choice."""


class Choices(NamedTuple):
    """The non-differentiated inputs: chosen experts, the round of each choice, and weights without gradients."""

    rounds: Int[Array, ""]
    """The number of further rounds."""
    queues: Queues
    is_first: Bool[Array, "tokens k"]
    """True for a choice that the first round computes."""
    experts: Int[Array, "tokens k"]
    """Ids among all experts; -1 for a choice that the exchange does not compute."""
    held: ExpertWeights
    """`ExpertWeights.held` of this device's experts."""


def first_round(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs) -> Float[Array, "tokens hidden"]:
    """Dispatches, computes and combines the choices that fit the first round; returns each token's sum, in at least f32."""
    # A gather delivers the tokens of all rounds: without the mask, choices of further rounds would be computed twice.
    ids = jnp.where(choices.is_first, choices.experts, -1)
    route = first_route(choices.queues, plan.first)
    return _round(plan, route, plan.first, plan.transport, choices._replace(experts=ids), inputs)


def further_round(
    plan: ExchangePlan, choices: Choices, index: Int[Array, ""], inputs: ExpertInputs
) -> Float[Array, "tokens hidden"]:
    """Computes overflow round `index` (from 0): returns its tokens' sums in at least f32, 0 for other tokens."""
    # Groups of other mesh axes may run another number of rounds. `all_to_all` within a group allows that, `ppermute` does not.
    route = further_route(choices.queues, index, plan.further)
    return _round(plan, route, plan.further, "all_to_all", choices, inputs)


def _round(
    plan: ExchangePlan,
    route: Route,
    capacity: Capacity,
    transport: TransportName | Transport,
    choices: Choices,
    inputs: ExpertInputs,
) -> Float[Array, "tokens hidden"]:
    """Returns the outputs of the tokens on `route`, in at least f32; 0 for the other tokens."""
    x, weights, trained = inputs.x, inputs.weights, inputs.trained
    steps: tuple[int, ...] = (plan.devices,)
    shares: tuple[int, ...] = (1,)
    if transport == "pairwise":
        steps = shares = devices_per_step(plan)
        x, trained = _with_last_gradients_together(x, trained)
    # Weights and ids travel as one array: f32 holds every id exactly. An id travels as id + 1, since an empty slot holds 0.
    wide, k = at_least_f32(weights.dtype), weights.shape[1]
    weights_and_ids = jnp.concatenate([weights.astype(wide), (choices.experts + 1).astype(wide)], axis=1)
    tokens, weights_and_ids = _send(plan, route, transport, steps, x, weights_and_ids)
    of_device = choices.held.with_trained(trained)
    first_expert = lax.axis_index(plan.axis_name).astype(jnp.int32) * of_device.num_experts

    def part(tokens: Array | RoundedTokens, arrived: Array) -> TokenPart:
        # Computed for each step separately: one computation for all steps would make each wait for the last choices.
        return TokenPart(tokens, arrived[:, :k], arrived[:, k:].astype(jnp.int32) - 1 - first_expert)

    ends = list(itertools.accumulate(step * (tokens.shape[0] // plan.devices) for step in steps[:-1]))
    of_steps = tokens.split(ends) if isinstance(tokens, RoundedTokens) else jnp.split(tokens, ends)
    outputs = experts(
        list(map(part, of_steps, jnp.split(weights_and_ids, ends))),
        of_device,
        backend=plan.backend,
        max_pairs=[step * capacity.pairs for step in steps],
        shares=shares,
        precision=plan.precision,
        activation=plan.activation or SILU,
    )
    return combine(jnp.concatenate(outputs), route, plan.axis_name, transport, steps)


def _send(
    plan: ExchangePlan,
    route: Route,
    transport: TransportName | Transport,
    steps: tuple[int, ...],
    x: Float[Array, "tokens hidden"],
    choices: Float[Array, "tokens 2*k"],
) -> tuple[Float[Array, "received hidden"] | RoundedTokens, Float[Array, "received 2*k"]]:
    """Returns the tokens and the choices that the devices of the axis send to this one, in the order of `dispatch`."""
    how = plan.axis_name, transport, steps
    if len(steps) > 2:
        # The second step needs all choices. As peer-to-peer copies they would queue after the copies of all tokens.
        sends_all = pairwise.sends_all(route)
        arrived = dispatch(choices, route, plan.axis_name, "gather" if sends_all else "all_to_all")
        own, *others = pairwise.by_distance(arrived, plan.axis_name)
        # Tokens leave after the choices, since copies queue in the order of their start.
        x, others = _when_arrived(x, others)
        choices = jnp.concatenate([choices if sends_all else own, *others])
    else:
        choices = dispatch(choices, route, *how)
        if plan.tokens_in_fp8:
            # Without this order two CPU devices returned wrong sums or hung when "gather" had further rounds.
            x, (choices,) = _when_arrived(x, [choices])
    tokens = dispatch_in_fp8(x, route, *how) if plan.tokens_in_fp8 else dispatch(x, route, *how)
    return tokens, choices


@jax.custom_vjp
def _when_arrived(x: Array, arrived: list[Array]) -> tuple[Array, list[Array]]:
    """Returns both unchanged; x is ready after `arrived`. Their gradients do not wait for each other."""
    return lax.optimization_barrier((x, arrived))


_when_arrived.defvjp(
    lambda x, arrived: (_when_arrived(x, arrived), None),
    lambda _, gradients: gradients,
)  # fmt: skip


def _with_last_gradients_together(x: Array, trained: ExpertWeights) -> tuple[Array, ExpertWeights]:
    """Returns both unchanged. The gradients of x and of w_down (or its change or accumulator) are ready together."""
    if isinstance(trained.gradient, Accumulators):
        x, down = _with_gradients_together(x, trained.gradient.down)
        return x, replace(trained, gradient=replace(trained.gradient, down=down))
    x, matrix = _with_gradients_together(x, trained.down)
    return x, replace(trained, down=matrix)


@jax.custom_vjp
def _with_gradients_together[Trained](x: Array, down: Trained) -> tuple[Array, Trained]:
    """Returns both unchanged; their gradients are ready together.

    The last part of x's gradient returns while w_down's gradient is computed. Without the barrier XLA would compute the
    latter later.
    """
    return x, down


_with_gradients_together.defvjp(
    lambda x, down: ((x, down), None),
    lambda _, gradients: lax.optimization_barrier(gradients),
)
