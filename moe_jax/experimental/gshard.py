"""GShard's two changes to a router's choices: random second experts, and a capacity of each expert per group of tokens.

Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668, section 2.2 and algorithm 1. Each function sets the weights of some
choices to 0. These experts are still computed, but add nothing to the output and get no gradient.

    routing = random_second_expert(moe.router(x), key)
    routing = drop_over_capacity(routing, num_groups=8, capacity=2 * x.shape[0] // (8 * num_experts))
    y = moe.experts(x, routing.weights, routing.experts)
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.layers.router import Routing


def random_second_expert(routing: Routing, key: jax.Array, valid: Bool[Array, "tokens"] | None = None) -> Routing:
    """Keeps the second expert of each token with probability min(1, 2 w), w its weight over the sum of the token's two.

    Args:
      routing: two experts per token, the likelier one first.
      valid: the mask that the routing was computed with. Dropped choices are subtracted from the experts' load.

    Raises:
      ValueError: the routing has another number of experts per token.
    """
    tokens, k = routing.weights.shape
    if k != 2:
        raise ValueError(f"random_second_expert needs 2 experts per token; got {k}")
    share = routing.weights[:, 1] / routing.weights.sum(axis=1)
    taken = jax.random.uniform(key, (tokens,), share.dtype) < 2 * share
    return _without(routing, jnp.stack([jnp.zeros_like(taken), ~taken], axis=1), valid)


def drop_over_capacity(
    routing: Routing, *, num_groups: int, capacity: int, valid: Bool[Array, "tokens"] | None = None
) -> Routing:
    """Limits each expert to `capacity` tokens in each of `num_groups` runs of tokens; `num_dropped` counts the rest.

    Within a group first choices come before second ones, and earlier tokens before later ones. Choices of weight 0 use no
    capacity; neither does padding, if `valid` is given. GShard's capacity is 2 tokens / (groups * experts).

    Raises:
      ValueError: groups that do not divide the tokens, or a capacity below 1.
    """
    tokens, k = routing.experts.shape
    if num_groups < 1 or tokens % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide the {tokens} tokens")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1; got {capacity}")
    waits = routing.weights > 0
    if valid is not None:
        waits &= valid[:, None]
    num_experts = routing.sums.expert_load.shape[0]
    # [groups, choices in the order in which they are served]
    experts, waits = (a.reshape(num_groups, -1, k).swapaxes(1, 2).reshape(num_groups, -1) for a in (routing.experts, waits))
    place = jax.vmap(_place, in_axes=(0, 0, None))(experts, waits, num_experts)
    over = (waits & (place >= capacity)).reshape(num_groups, k, -1).swapaxes(1, 2).reshape(tokens, k)
    kept = _without(routing, over, valid)
    return kept._replace(sums=replace(kept.sums, num_dropped=kept.sums.num_dropped + over.sum(dtype=jnp.int32)))


def gshard_loss(routing: Routing, valid: Bool[Array, "tokens"] | None = None) -> Float[Array, ""]:
    """Computes (1 / E) sum_e (c_e / T) m_e: c_e of T tokens have e as first choice, m_e is the mean probability of e.

    Expects the router's own routing, before choices are dropped.
    """
    counted = jnp.ones(len(routing.experts), bool) if valid is None else valid
    tokens = jnp.maximum(counted.sum(), 1)
    first = jnp.zeros(routing.sums.expert_load.shape, jnp.int32).at[routing.experts[:, 0]].add(counted.astype(jnp.int32))
    return jnp.mean(first / tokens * routing.sums.probability_sum / tokens)


def _place(experts: Int[Array, "choices"], waits: Bool[Array, "choices"], num_experts: int) -> Int[Array, "choices"]:
    """Returns, for each choice, the number of earlier waiting choices of the same expert."""
    queue = jnp.where(waits, experts, num_experts)
    line = jnp.argsort(queue, stable=True)
    sizes = jnp.zeros(num_experts + 1, jnp.int32).at[queue].add(1)
    starts = jnp.cumsum(sizes) - sizes
    in_line = jnp.arange(len(line), dtype=jnp.int32) - starts[queue[line]]
    return jnp.zeros_like(in_line).at[line].set(in_line, unique_indices=True)


def _without(routing: Routing, left_out: Bool[Array, "tokens k"], valid: Bool[Array, "tokens"] | None) -> Routing:
    counted = left_out if valid is None else left_out & valid[:, None]
    load = routing.sums.expert_load.at[routing.experts].add(-counted.astype(jnp.int32))
    return routing._replace(weights=jnp.where(left_out, 0, routing.weights), sums=replace(routing.sums, expert_load=load))
