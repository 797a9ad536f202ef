"""Sums the rounds of the exchange, whose number depends on the routing, and differentiates the sum.

The first round has room for an even routing times `capacity_factor`. Tokens beyond that queue for further (overflow) rounds,
until the longest queue of any device is empty. An even routing needs no further round. If every choice goes to one device,
about n / `capacity_factor` are needed. So no token is ever dropped, and no buffer is sized for the worst routing.

The first round saves the residuals of `experts_mlp`. Further rounds save nothing, since their number is unknown at compile
time. The backward pass recomputes them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moe_jax.kernels.precision import widened
from moe_jax.parallel.expert.one_round import Choices, ExpertInputs, first_round, further_round
from moe_jax.parallel.expert.settings import ExchangePlan


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_rounds(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs) -> Float[Array, "tokens hidden"]:
    """Runs the first round and `choices.rounds` overflow rounds; returns each token's sum in at least f32.

    Differentiable in `inputs`. The gradients of further rounds are summed in at least f32.
    """
    y = first_round(plan, choices, inputs)
    return _add_further_rounds(plan, choices, inputs, y)


def _all_rounds_forward(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs):
    def first(*inputs: Any) -> Array:
        return first_round(plan, choices, ExpertInputs(*inputs))

    # The pullback saves no arguments: the residuals below hold each of them once, not once per use.
    y, pullback = jax.vjp(first, *inputs, saveable_args=(False,) * len(inputs))
    y = _add_further_rounds(plan, choices, inputs, y)
    return y, (pullback, choices, inputs)


def _add_further_rounds(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs, y: Array) -> Array:
    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        index, y = state
        return index + 1, y + further_round(plan, choices, index, inputs)

    return lax.while_loop(lambda state: state[0] < choices.rounds, add, (jnp.zeros((), jnp.int32), y))[1]


def _all_rounds_backward(plan: ExchangePlan, residuals: tuple, dy: Array) -> tuple[None, ExpertInputs]:
    pullback, choices, inputs = residuals
    gradients = ExpertInputs(*pullback.replace(args_res=list(inputs))(dy))

    def add_further_rounds(gradients: ExpertInputs) -> ExpertInputs:
        def add(state: tuple[Array, ExpertInputs]) -> tuple[Array, ExpertInputs]:
            # In at least f32. Accumulators are the inputs' with all weight gradients added.
            index, sums = state
            of_inputs = _with_accumulators(inputs, sums)
            (of_round,) = jax.vjp(partial(further_round, plan, choices, index), of_inputs)[1](dy)
            without = of_round._replace(trained=replace(of_round.trained, gradient=None))
            own, others = (_with_accumulators(each, without) for each in (sums, of_round))
            return index + 1, _with_accumulators(jax.tree.map(jnp.add, own, others), of_round)

        start = jnp.zeros((), jnp.int32), jax.tree.map(widened, gradients)
        _, sums = lax.while_loop(lambda state: state[0] < choices.rounds, add, start)
        return jax.tree.map(lambda total, a: total.astype(a.dtype), sums, gradients)

    # The branch without further rounds allocates no f32 accumulators.
    gradients = lax.cond(choices.rounds > 0, add_further_rounds, lambda gradients: gradients, gradients)
    return None, gradients


def _with_accumulators(inputs: ExpertInputs, of: ExpertInputs) -> ExpertInputs:
    """Returns the inputs with the accumulators of others; None without any."""
    return inputs._replace(trained=replace(inputs.trained, gradient=of.trained.gradient))


all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)
