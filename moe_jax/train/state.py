"""The training state (step, parameters, optimizer): its initialisation and its update by gradients."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int, PyTree

from moe_jax.layers.lora import Frozen
from moe_jax.layers.router import ExpertBias
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.zero1 import optimizer_mesh, optimizer_shardings, to_parts, to_whole
from moe_jax.train import master_weights
from moe_jax.train.batch import replicated_sharding


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes, and frozen weights; `nnx.merge(graphdef, params, expert_bias, frozen)` is the model.

    Attributes:
      step: the number of finished steps.
      params: `nnx.state(model, nnx.Param)`, all f32 or all bf16. For a model with adapters, only the adapters.
      opt_state: the state of the optimizer, which works on f32 masters for any dtype of parameters.
      low_halves: the low halves of the masters of bf16 parameters (`train.master_weights`). None for f32 parameters, which are
        their own masters.
      expert_bias: `nnx.state(model, ExpertBias)`, empty for most architectures. The load changes it (`layers.balance`), not
        gradients or the optimizer.
      frozen: the frozen weights under adapters, `nnx.state(model, Frozen)`; empty without adapters. A step neither changes nor
        donates them. Checkpoints hold the state `without_frozen`.
    """

    step: Int[Array, ""]
    params: nnx.State
    opt_state: optax.OptState
    low_halves: nnx.State | None = None
    expert_bias: nnx.State = field(default_factory=lambda: nnx.State({}))
    frozen: nnx.State = field(default_factory=lambda: nnx.State({}))

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple[str, ...]]:
        """Returns the fields with their names. Without frozen weights that field is left out.

        Checkpoints of runs without adapters have no such entry, and Orbax restores only equal structures.
        """
        names = tuple(each.name for each in fields(self) if each.name != "frozen" or self.frozen)
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> "TrainState":
        """Inverts `tree_flatten_with_keys`."""
        return cls(**dict(zip(names, values, strict=True)))

    @property
    def fixed(self) -> nnx.State:
        """The non-differentiated part of the model: expert biases and frozen weights."""
        return nnx.merge_state(self.expert_bias, self.frozen) if self.frozen else self.expert_bias

    @property
    def without_frozen(self) -> "TrainState":
        """The state without frozen weights, which checkpoints omit because the base model has them."""
        return replace(self, frozen=nnx.State({}))


def init_state(model: Decoder, optimizer: optax.GradientTransformation, parallelism: Parallelism | None = None) -> TrainState:
    """Returns the initial state. It shares the model's arrays, which the first train step donates.

    Args:
      parallelism: with its `shard_optimizer`, moments and low halves are split over `data` too. Otherwise, and by default, each
        array is laid out like its parameter.

    Raises:
      ValueError: parameters that are not all f32 or all bf16, or `shard_optimizer` if `data` can split none of them. Or
        adapters with `overlap_micro_batches`.
    """
    # Committed to their devices like a restored state, so that both run the same compiled step.
    params, expert_bias, frozen = jax.tree.map(
        lambda p: jax.device_put(p, p.sharding), tuple(nnx.state(model, kind) for kind in (nnx.Param, ExpertBias, Frozen))
    )
    check_adapters(frozen, parallelism)
    everywhere = replicated_sharding(params)
    layouts = _optimizer_layouts(params, parallelism)
    opt_state = _init_optimizer(optimizer, params, layouts, everywhere)
    low_halves = master_weights.initial_low_halves(params, layouts)
    return TrainState(jnp.zeros((), jnp.int32, device=everywhere), params, opt_state, low_halves, expert_bias, frozen)


def check_adapters(frozen: nnx.State, parallelism: Parallelism | None) -> None:
    """Checks that adapters can be trained; passes without adapters.

    Raises:
      ValueError: overlapping micro-batches.
    """
    if jax.tree.leaves(frozen) and parallelism is not None and parallelism.overlap_micro_batches:
        raise ValueError("overlap_micro_batches=True is for training without adapters, whose micro-batches run in turn")


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: nnx.State, parallelism: Parallelism | None = None
) -> TrainState:
    """Applies an optimizer update to the f32 masters; returns the next state. Expert biases are unchanged.

    Args:
      gradients: f32, laid out like `state.params` or like the optimizer's state.
      parallelism: with its `shard_optimizer`, each device along `data` updates its part of the masters, and the parameters are
        gathered (`parallel.zero1`).
    """
    split, mesh = state.low_halves is not None, optimizer_mesh(parallelism)
    masters = master_weights.join(state.params, state.low_halves) if split else as_f32(state.params)
    if mesh is not None:
        masters, gradients = to_parts(masters, mesh), to_parts(gradients, mesh)
    # Muon has to know which devices share a matrix; optimizers without such an argument do not receive it.
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(gradients, state.opt_state, masters, parallelism=parallelism)
    masters = optax.apply_updates(masters, updates)
    params, low_halves = master_weights.split(masters) if split else (masters, None)
    if mesh is not None:
        params = to_whole(params, mesh)
    return replace(state, step=state.step + 1, params=params, opt_state=opt_state, low_halves=low_halves)


def as_f32[Tree: PyTree](tree: Tree) -> Tree:
    """Casts every array to f32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def check_layout(state: TrainState, parallelism: Parallelism | None) -> None:
    """Checks that the optimizer state is sharded as `parallelism` requires.

    Raises:
      ValueError: it is not, because `init_state` had another `parallelism`.
    """
    if optimizer_mesh(parallelism) is None:
        return
    layouts = _by_paths(_optimizer_layouts(state.params, parallelism), state.params)
    for path, array in jax.tree.leaves_with_path((state.opt_state, state.low_halves)):
        wanted = _layout_of(path, array.shape, layouts)
        if wanted is not None and not array.sharding.is_equivalent_to(wanted, array.ndim):
            raise ValueError(
                f"the optimizer's state is laid out as {array.sharding}, and Parallelism(shard_optimizer=True) splits it as "
                f"{wanted}; make the state with init_state(model, optimizer, parallelism)"
            )


def _optimizer_layouts(params: nnx.State, parallelism: Parallelism | None) -> nnx.State:
    """Returns the sharding of each parameter's moments and low half."""
    mesh = optimizer_mesh(parallelism)
    return jax.tree.map(lambda p: p.sharding, params) if mesh is None else optimizer_shardings(params, mesh)


def _init_optimizer(
    optimizer: optax.GradientTransformation, params: nnx.State, layouts: nnx.State, everywhere: Sharding
) -> optax.OptState:
    """Returns the optimizer's state for f32 masters, with moments laid out as `layouts`.

    Compiled, so that no f32 copy of the parameters is made.
    """

    def init(params):
        return optimizer.init(as_f32(params))

    of_path = _by_paths(layouts, params)

    def layout(path: tuple, array: jax.ShapeDtypeStruct) -> Sharding:
        return _layout_of(path, array.shape, of_path) or everywhere

    return jax.jit(init, out_shardings=jax.tree.map_with_path(layout, jax.eval_shape(init, params)))(params)


Layouts = dict[tuple, tuple[tuple[int, ...], Sharding]]
"""The shape of each parameter, and the sharding of its moments, by path."""


def _by_paths(layouts: nnx.State, params: nnx.State) -> Layouts:
    leaves = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(layouts), strict=True)
    return {parameter_path(path): (p.shape, layout) for (path, p), layout in leaves}


def _layout_of(path: tuple, shape: tuple[int, ...], layouts: Layouts) -> Sharding | None:
    """Returns the sharding of one of the optimizer's arrays; None if it is not a parameter's moment.

    A moment's path ends in its parameter's path, after the optimizer's own names, such as a label of `optax.multi_transform`.
    Axes over which a moment is a mean have size 1, and are not split.
    """
    names = parameter_path(path)
    found = (layouts.get(names[first:]) for first in range(len(names)))
    wanted, layout = next((pair for pair in found if pair is not None), (None, None))
    if wanted == shape or wanted is None or len(wanted) != len(shape):
        return layout if wanted == shape else None
    if any(size not in (1, whole) for size, whole in zip(shape, wanted, strict=True)):
        return None
    if not isinstance(layout, NamedSharding):
        return layout
    spec = (None if size == 1 else names for size, names in zip(shape, layout.spec, strict=True))
    return NamedSharding(layout.mesh, PartitionSpec(*spec))
