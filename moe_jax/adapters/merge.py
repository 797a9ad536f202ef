"""Adds the adapters of a model to its weights, or leaves them off."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.adapters.targets import targets_of
from moe_jax.kernels.low_rank import LowRank
from moe_jax.layers.lora import Frozen, has_adapters
from moe_jax.layers.quantised import is_quantised
from moe_jax.models.decoder import Decoder


def merge_adapter(model: Decoder) -> None:
    """Adds each change to its matrix, in place, and removes the adapters: the model is a plain one, and all of it can train.

        W = round(f32(W) + scale * b a)

    One layer at a time is in f32. The old matrices are donated. Rounding to bf16 is not undone by subtracting the change: keep
    the weights on disk.

    Raises:
      ValueError: the model has no adapters, or its weights are quantised: most of a change would be rounded away.
    """
    if not has_adapters(model):
        raise ValueError("the model has no adapters to merge")
    if is_quantised(nnx.state(model, Frozen)):
        raise ValueError(
            "the weights are quantised, and would round most of the change away: load them whole, and merge into them"
        )
    for target in targets_of(model):
        if (adapter := target.found) is not None:
            weight = getattr(target.module, target.weight)
            setattr(target.module, target.weight, Frozen(_merged(weight.get_value(), adapter.factors)))
    _remove_adapters(model)
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, Frozen):
                setattr(module, name, nnx.Param(variable.get_value()))


def without_adapter(model: Decoder) -> Decoder:
    """Returns the model with its adapters left off; it shares all arrays, so that it costs no memory.

    It is the reference of preference losses. Its parameters stay frozen.
    """
    twin = nnx.merge(*nnx.split(model))
    _remove_adapters(twin)
    return twin


def with_zero_changes(model: Decoder) -> Decoder:
    """Returns the model with changes of zero; it shares all arrays.

    Beside experts in FP8 numbers are rounded in other places than without adapters. So this is the model with which training
    of adapters begins, bit for bit.
    """
    twin = nnx.merge(*nnx.split(model))
    for target in targets_of(twin):
        if target.found is not None:
            target.found.scale = 0.0
    return twin


def _remove_adapters(model: Decoder) -> None:
    for target in list(targets_of(model)):
        if target.found is not None:
            delattr(target.module, target.adapter)


@partial(jax.jit, donate_argnums=0)
def _merged(weight: Float[Array, "*layers out in"], factors: LowRank) -> Float[Array, "*layers out in"]:
    """Adds b a to the matrices of each layer in turn; embedding and head are one layer."""
    stacked = weight.reshape(len(factors.a), *weight.shape[1 - factors.a.ndim :])

    def add(layer: Array, weight: Array) -> Array:
        w, a, b = (jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (weight, *factors))
        changed = w.astype(jnp.float32) + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.dynamic_update_index_in_dim(weight, changed.astype(weight.dtype), layer, 0)

    return jax.lax.fori_loop(0, len(stacked), add, stacked).reshape(weight.shape)
