"""Adds up the rounds of the exchange, whose number depends on the routing, and gives their sum a gradient.

The first round has room for an even routing times `capacity_factor`. Tokens beyond that queue for further rounds, until the
longest queue of any device is empty. An even routing needs no further round. If every choice falls on one device, it needs
about n / `capacity_factor` of them. So no token is ever lost, and no buffer is sized for the worst routing.

The first round saves the residuals that `experts_mlp` saves. Further rounds save nothing, since their number is not known when
the program is compiled. The backward pass computes them again.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.precision import widened
from moe_jax.parallel.expert.exchange_plan import ExchangePlan
from moe_jax.parallel.expert.inputs import Choices, ExpertInputs
from moe_jax.parallel.expert.one_round import first_round, further_round


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_rounds(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs) -> Float[Array, "tokens hidden"]:
    """Returns the outputs of the first round and of `choices.rounds` further ones, in at least f32.

    Differentiable in `inputs`. The gradients of further rounds are summed in at least f32.
    """
    y = first_round(plan, choices, inputs)
    return _add_further_rounds(plan, choices, inputs, y)


class _RoundsResiduals(NamedTuple):
    pullback: Any
    """The first round's pullback, without its arguments."""
    choices: Choices
    inputs: ExpertInputs


def _all_rounds_forward(plan: ExchangePlan, choices: Choices, inputs: ExpertInputs):
    def first(*inputs: Any) -> Array:
        return first_round(plan, choices, ExpertInputs(*inputs))

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
        return _OutputState(state.round_index + 1, state.y + further_round(plan, choices, state.round_index, inputs))

    return lax.while_loop(lambda state: state.round_index < choices.rounds, add, _OutputState(jnp.zeros((), jnp.int32), y)).y


class _GradientState(NamedTuple):
    round_index: Int[Array, ""]
    """The next further round, counted from 0."""
    sums: ExpertInputs
    """The gradients of all rounds so far, in at least f32. Accumulators are the given ones with all weight gradients added."""


def _all_rounds_backward(plan: ExchangePlan, residuals: _RoundsResiduals, dy: Array) -> tuple[None, ExpertInputs]:
    pullback, choices, inputs = residuals
    gradients = ExpertInputs(*pullback.replace(args_res=list(inputs))(dy))

    def add_further_rounds(gradients: ExpertInputs) -> ExpertInputs:
        def add(state: _GradientState) -> _GradientState:
            of_inputs = _with_accumulators(inputs, state.sums)
            (of_round,) = jax.vjp(partial(further_round, plan, choices, state.round_index), of_inputs)[1](dy)
            without = replace(of_round.trained, gradient=None)
            own, others = (_with_accumulators(each, of_round._replace(trained=without)) for each in (state.sums, of_round))
            return _GradientState(state.round_index + 1, _with_accumulators(jax.tree.map(jnp.add, own, others), of_round))

        start = _GradientState(jnp.zeros((), jnp.int32), jax.tree.map(widened, gradients))
        sums = lax.while_loop(lambda state: state.round_index < choices.rounds, add, start).sums
        return jax.tree.map(lambda total, a: total.astype(a.dtype), sums, gradients)

    # The branch without further rounds allocates no f32 accumulators.
    gradients = lax.cond(choices.rounds > 0, add_further_rounds, lambda gradients: gradients, gradients)
    return None, gradients


def _with_accumulators(inputs: ExpertInputs, of: ExpertInputs) -> ExpertInputs:
    """Returns the inputs with the accumulators of others; None without any."""
    return inputs._replace(trained=replace(inputs.trained, gradient=of.trained.gradient))


all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)
