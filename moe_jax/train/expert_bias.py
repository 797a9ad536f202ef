"""Biases that balance the experts' load (DeepSeek-V3): the load of a step's batch moves them, and no gradient does."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.layers.balance import move_bias
from moe_jax.parallel.layout import parameter_path


def move_expert_bias(expert_bias: nnx.State, expert_load: Int[Array, "moe_layers experts"], rate: float) -> nnx.State:
    """Moves the biases of each stack, [layers, experts], by the load of its layers (`layers.balance.move_bias`).

    `expert_load` is in the order of the layers. Without biases, or with rate 0, returns `expert_bias` itself.

    Raises:
      ValueError: the biases have more or fewer layers than the load.
    """
    biases = jax.tree.leaves_with_path(expert_bias)
    if not biases or rate == 0:
        return expert_bias
    places = layers_of_stacks({stack_of(parameter_path(path)): len(bias) for path, bias in biases})
    if (found := sum(len(bias) for _, bias in biases)) != len(expert_load):
        raise ValueError(f"the model has biases for {found} of its {len(expert_load)} layers with experts; all need one")
    loads = [expert_load[places[stack_of(parameter_path(path))]] for path, _ in biases]
    moved = [move_bias(bias, load, rate) for (_, bias), load in zip(biases, loads, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(expert_bias), moved)


def stack_of(path: tuple) -> tuple:
    """Returns the path of the stacked layers, a stage or a place in its pattern, that the parameter at `path` belongs to."""
    return path[:4] if path[2] == "places" else path[:2]


def layers_of_stacks(lengths: dict[tuple, int]) -> dict[tuple, slice]:
    """Returns the places of each stack's layers among the layers of all stacks, in the order in which tokens pass them.

    Args:
      lengths: the number of layers of each stack, by `stack_of`. The stacks of a stage take turns.
    """
    found: dict[tuple, slice] = {}
    first = 0
    for _, group in itertools.groupby(sorted(lengths), lambda stack: stack[1]):
        stacks = list(group)
        end = first + sum(lengths[stack] for stack in stacks)
        found |= {stack: slice(first + place, end, len(stacks)) for place, stack in enumerate(stacks)}
        first = end
    return found


def expert_bias_range(expert_bias: nnx.State) -> dict[str, Float[Array, "moe_layers 2"]]:
    """Returns the metric "expert_bias_range", each layer's (smallest, largest) bias; no metric for a model without biases."""
    leaves = jax.tree.leaves_with_path(expert_bias)
    if not leaves:
        return {}
    biases = jnp.concatenate([bias for _, bias in leaves])
    places = layers_of_stacks({stack_of(parameter_path(path)): len(bias) for path, bias in leaves})
    if any(place.step > 1 for place in places.values()):
        biases = biases[np.argsort(np.concatenate([np.arange(len(biases))[place] for place in places.values()]))]
    return {"expert_bias_range": jnp.stack([biases.min(axis=1), biases.max(axis=1)], axis=1)}
