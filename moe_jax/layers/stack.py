"""Alike layers, stacked along a leading axis, run one after the other: `lax.scan` whose gradient writes no memory twice.

`lax.scan` fills every stacked array with zeros before its loop writes into it. For the gradients of Qwen3-30B-A3B's experts
that is 58 GB, more than a third of a backward pass over few tokens. Here those arrays are allocated and no more, each layer's
part is written once, and a layer's weights are read again where they lie in the stack.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.kernels.varying import vary_as

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_layers(body: Body, shared, of_layer, x, parameters):
    """x, y[l] = body(shared, of_layer[l], x, parameters[l]) for each layer l in turn; returns the last x and y, stacked.

    Differentiable in x and parameters, each gradient in its argument's dtype; kept for backward is what `body` needs of each
    layer (`jax.checkpoint` it, and that is x). Memory is as with `lax.scan`.

    Args:
      body: the layer; it closes over no array.
      shared: arrays that all layers read, not differentiated.
      of_layer: arrays with the layers as leading axis, not differentiated.
      x: what goes from layer to layer, of floats.
      parameters: arrays with the layers as leading axis.
    """

    def step(x, arguments):
        return body(shared, arguments[0], x, arguments[1])

    return lax.scan(step, x, (of_layer, parameters))


def _forward(body: Body, shared, of_layer, x, parameters):
    num_layers = jax.tree.leaves(parameters)[0].shape[0]

    def layer(i, x):
        arguments = shared, _take(of_layer, i), x, _take(parameters, i)
        # Restored from where they lie: a copy of each layer's weights would double them.
        (x, y), pullback = jax.vjp(
            body, *arguments, saveable_args=(False, False, True, False), in_nzs=(False, False, True, True)
        )
        return x, (y, pullback)

    def step(state):
        i, x, kept = state
        x, of_this = layer(i, x)
        return i + 1, x, _put(kept, jax.tree.leaves(of_this), i)

    # Two traces of a pullback are two tree structures of the same leaves.
    shapes, structure = jax.tree.flatten(jax.eval_shape(layer, 0, x)[1])
    kept = _unwritten(num_layers, shapes)
    _, x, kept = lax.while_loop(lambda state: state[0] < num_layers, step, (0, x, kept))
    y, pullbacks = jax.tree.unflatten(structure, kept)
    return (x, y), (shared, of_layer, parameters, pullbacks)


def _backward(body: Body, kept, gradients):
    shared, of_layer, parameters, pullbacks = kept
    dx, dy = gradients
    num_layers = jax.tree.leaves(parameters)[0].shape[0]

    def step(state):
        turn, dx, dparameters = state
        i = num_layers - 1 - turn
        pullback = _take(pullbacks, i)
        arguments = shared, _take(of_layer, i), pullback.args_res[2], _take(parameters, i)
        _, _, dx, dlayer = pullback.replace(args_res=list(arguments))((dx, _take(dy, i)))
        return turn + 1, dx, _put(dparameters, dlayer, i)

    dparameters = _unwritten(num_layers, _take(parameters, 0))
    _, dx, dparameters = lax.while_loop(lambda state: state[0] < num_layers, step, (0, dx, dparameters))
    return None, None, dx, dparameters


run_layers.defvjp(_forward, _backward)


def _take(stacked, i):
    """Layer i of every array; gradients of integers have no values to index."""

    def take(a):
        if a.dtype == jax.dtypes.float0:
            return np.zeros(a.shape[1:], a.dtype)
        part = lax.dynamic_slice(a, (i, *[0] * (a.ndim - 1)), (1, *a.shape[1:]), allow_negative_indices=False)
        return part.reshape(a.shape[1:])

    return jax.tree.map(take, stacked)


def _put(stacked, layer, i):
    """The stacked arrays with `layer` in place of layer i."""

    def put(a, part):
        # An index that may count from the end hides from XLA that a kernel can write its result here, without a copy.
        return lax.dynamic_update_slice(a, part[None], (i, *[0] * part.ndim), allow_negative_indices=False)

    return jax.tree.map(put, stacked, layer)


def _unwritten(num_layers: int, like):
    """Arrays for `num_layers` layers like those of `like`, with anything in them."""
    # The compiler would not split an allocation over devices: each would allocate the whole.
    splits = jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
    empty = jnp.zeros if splits else lax.empty
    return jax.tree.map(lambda a: vary_as(empty((num_layers, *a.shape), a.dtype), a), like)
