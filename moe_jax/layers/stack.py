"""Alike layers, stacked along a leading axis, run one after the other: `lax.scan` whose gradient writes no memory twice.

`lax.scan` fills every stacked array with zeros before its loop writes into it. For the gradients of Qwen3-30B-A3B's experts
that is 58 GB, more than a third of a backward pass over few tokens. Here those arrays are only allocated, each layer's part is
written once, and a layer's weights are read again from their place in the stack.

With n layers, one turn of each loop does the following. A parameter gather and a gradient scatter (`parallel.fsdp.LayerGather`)
start before the layer computes, and are waited for behind it. The layer's kernels hide them.

forward pass, layers upwards, i = turn:

| turn | computes | receives | sends |
|---|---|---|---|
| before the loop | | gathered parameters of layer 0 | parts of layer 0 |
| i | layer i | gathered parameters of layer i + 1 | parts of layer i + 1 |

backward pass, layers downwards, i = n - 1 - turn:

| turn | computes | receives | sends |
|---|---|---|---|
| before the loop | | gathered parameters of layer n - 1 | parts of layer n - 1 |
| i, recomputation (remat) | layer i again | gathered parameters of layer i - 1 | parts of layer i - 1 |
| i, backward | gradients of layer i | own parts of the gradients of layer i + 1 | gradients of layer i + 1 |
| behind the loop | | own parts of the gradients of layer 0 | gradients of layer 0 |

In the last turn a layer is gathered whose result nothing reads: the last layer forward, layer 0 backward. In the first backward
turn zeros are scattered, which the second turn overwrites. Without remat the gather too hides behind the backward of layer i.
With "offload", the saved input of layer i - 1 is copied from the host's memory in the turn of layer i.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.fsdp import LayerGather

Body = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""A layer: (x, y) = body(shared, per_layer, x, parameters, accumulators)."""

Remat = bool | Literal["offload"]
"""True recomputes a layer in the backward pass, from its input alone; "offload" keeps that input in the host's memory."""


def run_layers(
    body: Body, shared, per_layer, x, parameters, gather: LayerGather | None = None, accumulators=None, *, remat: Remat = False
):
    """Computes x, y[l] = body(shared, per_layer[l], x, parameters[l], accumulators[l]) for each layer l in turn.

    Returns the last x, and y stacked. Differentiable in x and parameters; each gradient has its argument's dtype. The residuals
    are the arrays that `body` needs of each layer; with `remat`, x alone. Memory is as with `lax.scan`.

    With `gather`, inside `jax.shard_map`, `parameters` are a device's parts. While a layer computes, the parameters of the next
    layer are gathered. In the backward pass, the gradients of the layer before also travel to the devices that keep the parts.
    With peer-to-peer copies (`parallel.collectives.hops`) both hide behind the layer.

    Args:
      body: the layer; it closes over no array.
      shared: arrays that all layers read, not differentiated.
      per_layer: arrays with the layers as leading axis, not differentiated.
      x: floats that go from layer to layer.
      parameters: arrays with the layers as leading axis.
      gather: makes whole layers from parts.
      accumulators: arrays with the layers as leading axis. `body` gives each a gradient that is the array plus what was added
        to it (`kernels.experts.internal.Accumulators`); the gradients are written over the arrays.
    """
    if gather is None:
        gather = LayerGather.of_whole_layer(len(jax.tree.leaves(parameters)))
    return _run_layers(body, gather, remat, shared, per_layer, x, parameters, accumulators)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run_layers(body: Body, gather: LayerGather, remat: Remat, shared, per_layer, x, parameters, accumulators):
    last = jax.tree.leaves(parameters)[0].shape[0] - 1

    def step(state, arguments):
        x, gathered = state
        i, own, parts, own_accumulators = arguments
        arriving = gather.start_gather(_take(parameters, jnp.minimum(i + 1, last)))
        x, y = body(shared, own, x, gather.layer(parts, gathered), own_accumulators)
        x, arriving = gather.barrier(x, arriving)
        return (x, gather.finish_gather(arriving)), y

    first = gather.gather(_take(parameters, 0))
    (x, _), y = lax.scan(step, (x, first), (jnp.arange(last + 1), per_layer, parameters, accumulators))
    return x, y


class Residuals(NamedTuple):
    """The arrays that the backward pass reads."""

    shared: Any
    per_layer: Any
    parameters: Any
    accumulators: Any
    saved: Any
    """With remat each layer's x, else the residuals of each layer's pullback; stacked."""


class ForwardState(NamedTuple):
    """The state between two turns of the forward loop."""

    turn: Int[Array, ""] | int
    x: Any
    """The input of layer `turn`."""
    gathered: list[Array]
    """The gathered parameters of layer `turn`."""
    written: list[Array]
    """The leaves of y and of `Residuals.saved`, stacked, written up to layer `turn` - 1."""


def _forward(body: Body, gather: LayerGather, remat: Remat, shared, per_layer, x, parameters, accumulators):
    last = jax.tree.leaves(parameters)[0].shape[0] - 1
    placed = partial(_in_memory, jax.memory.Space.Host) if remat == "offload" else lambda arrays: arrays

    def layer(i, x, gathered):
        arguments = shared, _take(per_layer, i), x, gather.layer(_take(parameters, i), gathered), _take(accumulators, i)
        if remat:
            after, y = body(*arguments)
            return after, (y, placed(x))
        # Parameters are no residuals: the backward pass reads them from the stack. A copy of each layer's would double them.
        (after, y), pullback = jax.vjp(
            body, *arguments, saveable_args=(False, False, True, False, False), in_nzs=(False, False, True, True, True)
        )
        return after, (y, placed(pullback))

    def step(state: ForwardState) -> ForwardState:
        i = state.turn
        arriving = gather.start_gather(_take(parameters, jnp.minimum(i + 1, last)))
        x, results = layer(i, state.x, state.gathered)
        x, arriving = gather.barrier(x, arriving)
        return ForwardState(i + 1, x, gather.finish_gather(arriving), _put(state.written, jax.tree.leaves(results), i))

    # The loop carries leaves, because two traces of a pullback are two tree structures with the same leaves.
    first = gather.gather(_take(parameters, 0))
    shapes, structure = jax.tree.flatten(jax.eval_shape(layer, 0, x, first)[1])
    y, saved = jax.tree.unflatten(structure, _unwritten(last + 1, shapes))
    state = ForwardState(0, x, first, jax.tree.leaves((y, placed(saved))))
    state = lax.while_loop(lambda state: state.turn <= last, step, state)
    y, saved = jax.tree.unflatten(structure, state.written)
    return (state.x, y), Residuals(shared, per_layer, parameters, accumulators, saved)


class BackwardState(NamedTuple):
    """The state between two turns of the backward loop, where the next turn computes layer i = last - turn."""

    turn: Int[Array, ""] | int
    dx: Any
    """The gradient of the output of layer i."""
    gathered: list[Array]
    """The gathered parameters of layer i."""
    restored: Any
    """The residuals of layer i, copied from the host's memory; None without "offload"."""
    to_scatter: list[Array]
    """The gradients of the gathered parameters of layer i + 1, of this device's tokens alone; zeros in the first turn."""
    scattered: list[Array]
    """The gradients of this device's parts of gathered parameters, stacked, written from layer i + 2 on."""
    whole: list[Array]
    """The gradients of the parameters that are not gathered, stacked, written from layer i + 1 on."""
    accumulators: Any
    """The accumulators, stacked, with the gradients from layer i + 1 on added."""


def _backward(body: Body, gather: LayerGather, remat: Remat, residuals: Residuals, gradients):
    shared, parameters = residuals.shared, residuals.parameters
    dx, dy = gradients
    last = jax.tree.leaves(parameters)[0].shape[0] - 1
    offload = remat == "offload"

    def restored(i):
        """Copies what layer i saved from the host's memory, one layer ahead of its use."""
        return _in_memory(jax.memory.Space.Device, _take(residuals.saved, i)) if offload else None

    def step(state: BackwardState) -> BackwardState:
        i = last - state.turn
        below = jnp.maximum(i - 1, 0)
        arriving, restored_below = gather.start_gather(_take(parameters, below)), restored(below)
        scattering = gather.start_scatter(state.to_scatter)
        saved = state.restored if offload else _take(residuals.saved, i)
        layer, dx = gather.layer(_take(parameters, i), state.gathered), state.dx
        if remat:
            arguments = shared, _take(residuals.per_layer, i), saved, layer, _take(state.accumulators, i)
            _, pullback = jax.vjp(body, *arguments, in_nzs=(False, False, True, True, True))
            # Recomputation hides the parameter gather, the backward pass hides the gradient scatter. dx is in the barrier too:
            # otherwise expert parallelism sends it before the tokens that are needed first.
            (pullback, dx), arriving = gather.barrier((pullback, dx), arriving)
        else:
            arguments = shared, _take(residuals.per_layer, i), saved.args_res[2], layer, _take(state.accumulators, i)
            pullback = saved.replace(args_res=list(arguments))
        _, _, dx, dlayer, daccumulators = pullback((dx, _take(dy, i)))
        to_scatter, whole = gather.split(dlayer)
        (dx, to_scatter), (arriving, scattering) = gather.barrier((dx, to_scatter), (arriving, scattering))
        # In the first turn these are zeros, in a place that the second turn overwrites.
        scattered = _put(state.scattered, gather.finish_scatter(scattering, state.scattered), jnp.minimum(i + 1, last))
        return BackwardState(
            turn=state.turn + 1,
            dx=dx,
            gathered=gather.finish_gather(arriving),
            restored=restored_below,
            to_scatter=to_scatter,
            scattered=scattered,
            whole=_put(state.whole, whole, i),
            accumulators=_put(state.accumulators, daccumulators, i),
        )

    gathered = gather.gather(_take(parameters, last))
    scattered, whole = gather.split(_unwritten(last + 1, _take(parameters, 0)))
    state = BackwardState(
        turn=0,
        dx=dx,
        gathered=gathered,
        restored=restored(last),
        to_scatter=jax.tree.map(jnp.zeros_like, gathered),
        scattered=scattered,
        whole=whole,
        accumulators=residuals.accumulators,
    )
    state = lax.while_loop(lambda state: state.turn <= last, step, state)
    of_first = gather.finish_scatter(gather.start_scatter(state.to_scatter), state.scattered)
    scattered = _put(state.scattered, of_first, 0)
    return None, None, state.dx, gather.join(parameters, scattered, state.whole), state.accumulators


_run_layers.defvjp(_forward, _backward)


def _in_memory(space: jax.memory.Space, arrays):
    return jax.tree.map(lambda a: jax.device_put(a, space), arrays)


def _take(stacked, i):
    """Returns layer i of every array; gradients of integers have no values to index."""

    def take(a):
        if a.dtype == jax.dtypes.float0:
            return np.zeros(a.shape[1:], a.dtype)
        part = lax.dynamic_slice(a, (i, *[0] * (a.ndim - 1)), (1, *a.shape[1:]), allow_negative_indices=False)
        return part.reshape(a.shape[1:])

    return jax.tree.map(take, stacked)


def _put(stacked, layer, i):
    """Returns the stacked arrays with `layer` in place of layer i."""

    def put(a, part):
        # An index that may count from the end would hide from XLA that a kernel can write its result here: it would copy.
        return lax.dynamic_update_slice(a, part[None], (i, *[0] * part.ndim), allow_negative_indices=False)

    return jax.tree.map(put, stacked, layer)


def _unwritten(num_layers: int, like):
    """Allocates stacks of `num_layers` arrays with the shapes and dtypes of `like`; their contents are undefined."""
    # XLA would not split an allocation over devices: each device would allocate the whole array. Zeros it splits.
    splits = jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
    empty = jnp.zeros if splits else lax.empty
    return jax.tree.map(lambda a: vary_as(empty((num_layers, *a.shape), a.dtype), a), like)
