"""Experts change places between training steps: a relabelled model that computes the same.

Where an expert's weights go, its row of the router, the low halves of its masters and the optimizer's moments go too. The
model, and a checkpoint written from it, are as good as before; only the numbers of the experts have changed. One thing looks at
numbers: transformers' load-balancing loss averages expert i's load over all layers, so that its value changes a little.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.layout import parameter_path
from moe_jax.train.step import TrainState


def rebalance(
    state: TrainState, expert_load: Float[np.ndarray, "moe_layers experts"], devices: int
) -> tuple[TrainState, Int[np.ndarray, "moe_layers experts"]]:
    """The state with each layer's experts dealt out evenly to `devices` of the mesh axis `expert`, and the orders that did it.

    Args:
      state: is donated.
      expert_load: of steps before this one, as the metrics give it; sums over some hundred steps say more than one.
    """
    orders = np.stack([balanced_order(load, devices) for load in np.asarray(expert_load)])
    return move_experts(state, orders), orders


def move_experts(state: TrainState, orders: Int[np.ndarray, "moe_layers experts"]) -> TrainState:
    """The state with expert orders[l, i] of MoE layer l in place i. The state passed in is donated.

    Raises:
      ValueError: orders that are no permutations, or are not of this model.
    """
    stages = _orders_of_stages(state, np.asarray(orders))

    def move(path, array):
        names = parameter_path(path)
        if names[:1] != ("stages",) or not {"experts", "router"} & {*names}:
            return array
        # One layer at a time: experts of one layer may meet on a device, all of them may not.
        return jax.lax.map(lambda layer: layer[0][layer[1]], (array, jnp.asarray(stages[names[1]])))

    layout = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(lambda state: jax.tree.map_with_path(move, state), donate_argnums=0, out_shardings=layout)(state)


def _orders_of_stages(state: TrainState, orders: np.ndarray) -> dict[int, np.ndarray]:
    """The rows of `orders` that belong to each stage with experts."""
    shapes = {
        names[1]: p.shape[:2]
        for names, p in ((parameter_path(path), p) for path, p in jax.tree.leaves_with_path(state.params))
        if names[-1] == "gate_up_proj"
    }
    layers, experts = sum(shape[0] for shape in shapes.values()), {shape[1] for shape in shapes.values()}
    if orders.ndim != 2 or len(orders) != layers or {orders.shape[1]} != experts:
        raise ValueError(
            f"orders must be [moe_layers, experts] = [{layers}, {', '.join(map(str, experts))}]; got {orders.shape}"
        )
    if not (np.sort(orders, axis=1) == np.arange(orders.shape[1])).all():
        raise ValueError("each row of orders must be a permutation of the experts")
    ends = np.cumsum([shapes[stage][0] for stage in sorted(shapes)])
    return {stage: orders[end - shapes[stage][0] : end] for stage, end in zip(sorted(shapes), ends, strict=True)}
