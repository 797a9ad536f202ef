"""Rebalances experts between training steps: relabels them so that devices have equal work; the model computes the same.

An expert's weights move together with its row of the router, the low halves of its masters and the optimizer's moments. The
model, and a checkpoint written from it, are equivalent: only the experts' numbers have changed. One value depends on the
numbers: transformers' load-balancing loss averages expert i's load over all layers. If the router chooses among groups of
experts (DeepSeek), a group's experts stay neighbours.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int, Num, PyTree

from moe_jax.config import ModelConfig
from moe_jax.models.layers_in_pipe import layers_of_stacks, stack_of
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.pipeline.chunks import refuse_chunks
from moe_jax.train.state import TrainState


def rebalance(
    state: TrainState, config: ModelConfig, expert_load: Num[np.ndarray, "moe_layers experts"], devices: int
) -> tuple[TrainState, Int[np.ndarray, "moe_layers experts"]]:
    """Reassigns each layer's experts so that devices have equal load; returns the new state and the orders used.

    Args:
      state: the training state, which is donated.
      config: the model's.
      expert_load: the load of earlier steps, as in the metrics. Use sums over some hundred steps.

    Raises:
      ValueError: the experts cannot be divided among the devices (`balanced_order`), or the loads do not match the model.
    """
    expert_load, groups = np.asarray(expert_load), num_groups(config)
    _check_shape("expert_load", expert_load, config)
    orders = np.stack([balanced_order(load, devices, groups) for load in expert_load])
    stays = (orders == np.arange(orders.shape[1])).all(axis=1)
    # Layer i's busiest experts go to device, or group, i. On one device for all layers they would weigh more in a
    # load-balancing loss that averages over layers.
    shift = orders.shape[1] // (devices if groups == 1 else min(devices, groups))
    orders = np.stack([order if stays[i] else np.roll(order, i * shift) for i, order in enumerate(orders)])
    return move_experts(state, config, orders), orders


def move_experts[Tree: PyTree](state: Tree, config: ModelConfig, orders: Int[np.ndarray, "moe_layers experts"]) -> Tree:
    """Permutes experts: expert orders[l, i] of MoE layer l moves to position i. The state passed in is donated.

    Args:
      state: a TrainState, or several of its parts; one part must be the parameters or their moments.

    Raises:
      ValueError: orders that are not permutations, do not have this model's shape, or split a group's experts. Or the layers
        are split into a pipeline's chunks.
    """
    refuse_chunks(state, "moving experts")
    orders = np.asarray(orders)
    _check_orders(orders, config)
    stages = _orders_of_stages(state, orders)

    def move(path, array: Array) -> Array:
        names = parameter_path(path)
        if names[:1] != ("stages",) or not {"experts", "router"} & {*names}:
            return array
        return _move(array, stages[stack_of(names)], array.sharding)

    # One array at a time: memory has room for a second copy of one array, not of all.
    return jax.tree.map_with_path(move, state)


def num_groups(config: ModelConfig) -> int:
    """Returns the number of expert groups of the model's routers (group-limited routing); 1 without groups."""
    return config.experts.rule.num_groups if config.experts else 1


@dataclass(frozen=True)
class Places:
    """Tracks which expert is at which position, and each position's load since the last rebalancing; stored as JSON.

    Attributes:
      numbers: the original number of the expert in each place.
      load: the tokens that each place received since experts last moved.
    """

    numbers: Int[np.ndarray, "moe_layers experts"]
    load: Int[np.ndarray, "moe_layers experts"]

    @classmethod
    def at_first(cls, moe_layers: int, num_experts: int) -> "Places":
        """Returns the initial state: every expert at its own position, no load yet."""
        numbers = np.tile(np.arange(num_experts), (moe_layers, 1))
        return cls(numbers, np.zeros_like(numbers))

    @classmethod
    def from_json(cls, saved: dict[str, list]) -> "Places":
        """Reads the result of `to_json`."""
        return cls(**{name: np.asarray(values) for name, values in saved.items()})

    def to_json(self) -> dict[str, list]:
        """Returns the fields as lists of numbers."""
        return {"numbers": self.numbers.tolist(), "load": self.load.tolist()}

    def after_step(self, expert_load: Int[np.ndarray, "moe_layers experts"]) -> "Places":
        """Returns a copy with one more step's load added."""
        return Places(self.numbers, self.load + expert_load)

    def by_number(self, of_places: Int[np.ndarray, "moe_layers experts"]) -> Int[np.ndarray, "moe_layers experts"]:
        """Reorders an array over positions into the order of original expert numbers."""
        return np.take_along_axis(of_places, self.back, axis=1)

    @property
    def back(self) -> Int[np.ndarray, "moe_layers experts"]:
        """Returns the orders for `move_experts` that undo all rebalancing."""
        return np.argsort(self.numbers, axis=1)

    def rebalance(self, state: TrainState, config: ModelConfig, devices: int) -> tuple[TrainState, "Places"]:
        """Calls `rebalance` with the load since experts last moved."""
        state, orders = rebalance(state, config, self.load, devices)
        return state, Places(np.take_along_axis(self.numbers, orders, axis=1), np.zeros_like(self.load))


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def _move(
    stacked: Num[Array, "layers experts ..."], orders: Int[Array, "layers experts"], layout: Sharding
) -> Num[Array, "layers experts ..."]:
    # One layer at a time: a device has room for all experts of one layer, but not of all layers.
    moved = jax.lax.map(lambda layer: layer[0][layer[1]], (stacked, orders))
    return jax.lax.with_sharding_constraint(moved, layout)


def _check_shape(name: str, of_layers: np.ndarray, config: ModelConfig) -> None:
    shape = len(config.routed_layers), config.experts.num_experts if config.experts else 0
    if not all(shape):
        raise ValueError("the model has no experts")
    if of_layers.shape != shape:
        raise ValueError(f"{name} must be [moe_layers, experts] = {list(shape)}; got {list(of_layers.shape)}")


def _check_orders(orders: np.ndarray, config: ModelConfig) -> None:
    _check_shape("orders", orders, config)
    layers, experts = orders.shape
    if not (np.issubdtype(orders.dtype, np.integer) and (np.sort(orders, axis=1) == np.arange(experts)).all()):
        raise ValueError("each row of orders must be a permutation of the experts, in integers")
    group = orders.reshape(layers, num_groups(config), -1) // (experts // num_groups(config))
    if (group != group[:, :, :1]).any():
        raise ValueError(f"the experts of each of the router's {num_groups(config)} groups must stay neighbours")


def _orders_of_stages(state: PyTree, orders: np.ndarray) -> dict[tuple, np.ndarray]:
    """Returns the rows of `orders` that belong to each stack of layers with experts."""
    named = ((parameter_path(path), array) for path, array in jax.tree.leaves_with_path(state))
    lengths = {stack_of(n): len(array) for n, array in named if n[:1] == ("stages",) and n[-1] == "gate_up_proj"}
    return {stack: orders[places] for stack, places in layers_of_stacks(lengths).items()}
