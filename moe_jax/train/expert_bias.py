"""Biases that balance the experts' load (DeepSeek-V3): the load of a step's batch moves them, and no gradient does."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.layers.balance import move_bias


def move_expert_bias(expert_bias: nnx.State, expert_load: Int[Array, "moe_layers experts"], rate: float) -> nnx.State:
    """Moves the biases of each stage, [layers, experts], by the load of the stage's layers (`layers.balance.move_bias`).

    Stages follow each other in `expert_load`. Without biases, or with rate 0, returns `expert_bias` itself.

    Raises:
      ValueError: the biases have more or fewer layers than the load.
    """
    biases, structure = jax.tree.flatten(expert_bias)
    if not biases or rate == 0:
        return expert_bias
    ends = np.cumsum([len(bias) for bias in biases])
    if ends[-1] != len(expert_load):
        raise ValueError(f"the model has biases for {ends[-1]} of its {len(expert_load)} layers with experts; all need one")
    loads = jnp.split(expert_load, ends[:-1])
    return jax.tree.unflatten(structure, [move_bias(bias, load, rate) for bias, load in zip(biases, loads, strict=True)])


def expert_bias_range(expert_bias: nnx.State) -> dict[str, Float[Array, "moe_layers 2"]]:
    """Returns the metric "expert_bias_range", each layer's (smallest, largest) bias; no metric for a model without biases."""
    stages = jax.tree.leaves(expert_bias)
    if not stages:
        return {}
    biases = jnp.concatenate(stages)
    return {"expert_bias_range": jnp.stack([biases.min(axis=1), biases.max(axis=1)], axis=1)}
