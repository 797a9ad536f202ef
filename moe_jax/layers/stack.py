"""Alike layers, stacked along a leading axis, run one after the other: `lax.scan` whose gradient writes no memory twice.

`lax.scan` fills every stacked array with zeros before its loop writes into it. For the gradients of Qwen3-30B-A3B's experts
that is 58 GB, more than a third of a backward pass over few tokens. Here those arrays are allocated and no more, each layer's
part is written once, and a layer's weights are read again where they lie in the stack.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.fsdp import LayerGather

Body = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]

Remat = bool | Literal["offload"]
"""Whether a layer is computed again in the backward pass, of its input alone; with "offload" that is in the host's memory."""


def run_layers(
    body: Body, shared, of_layer, x, parameters, gather: LayerGather | None = None, totals=None, *, remat: Remat = False
):
    """x, y[l] = body(shared, of_layer[l], x, parameters[l], totals[l]) for each layer l in turn; the last x and y, stacked.

    Differentiable in x and parameters, each gradient in its argument's dtype; kept for backward is what `body` needs of each
    layer, with `remat` x alone. Memory is as with `lax.scan`.

    With `gather`, inside `jax.shard_map`, `parameters` are a device's parts. While a layer computes, the next one's are
    gathered, in backward too, where the gradients of the layer before travel to the devices that keep the parts; by copies
    (`parallel.hops`) both hide behind it.

    Args:
      body: the layer; it closes over no array.
      shared: arrays that all layers read, not differentiated.
      of_layer: arrays with the layers as leading axis, not differentiated.
      x: what goes from layer to layer, of floats.
      parameters: arrays with the layers as leading axis.
      gather: how whole layers come out of parts.
      totals: arrays with the layers as leading axis, whose gradients by way of `body` are they and more
        (`kernels.experts.internal.Accumulators`): their gradients are written over them.
    """
    if gather is None:
        gather = LayerGather.of_nothing(len(jax.tree.leaves(parameters)))
    return _run_layers(body, gather, remat, shared, of_layer, x, parameters, totals)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run_layers(body: Body, gather: LayerGather, remat: Remat, shared, of_layer, x, parameters, totals):
    last = jax.tree.leaves(parameters)[0].shape[0] - 1

    def step(state, arguments):
        x, fetched = state
        i, own, parts, of_totals = arguments
        sent = gather.send(_take(parameters, jnp.minimum(i + 1, last)))
        x, y = body(shared, own, x, gather.layer(parts, fetched), of_totals)
        x, sent = gather.behind(x, sent)
        return (x, gather.receive(sent)), y

    first = gather.fetch(_take(parameters, 0))
    (x, _), y = lax.scan(step, (x, first), (jnp.arange(last + 1), of_layer, parameters, totals))
    return x, y


def _forward(body: Body, gather: LayerGather, remat: Remat, shared, of_layer, x, parameters, totals):
    last = jax.tree.leaves(parameters)[0].shape[0] - 1
    placed = partial(_in_memory, jax.memory.Space.Host) if remat == "offload" else lambda arrays: arrays

    def layer(i, x, fetched):
        arguments = shared, _take(of_layer, i), x, gather.layer(_take(parameters, i), fetched), _take(totals, i)
        if remat:
            after, y = body(*arguments)
            return after, (y, placed(x))
        # Restored from where they lie: a copy of each layer's weights would double them.
        (after, y), pullback = jax.vjp(
            body, *arguments, saveable_args=(False, False, True, False, False), in_nzs=(False, False, True, True, True)
        )
        return after, (y, placed(pullback))

    def step(state):
        i, x, fetched, kept = state
        sent = gather.send(_take(parameters, jnp.minimum(i + 1, last)))
        x, of_this = layer(i, x, fetched)
        x, sent = gather.behind(x, sent)
        return i + 1, x, gather.receive(sent), _put(kept, jax.tree.leaves(of_this), i)

    # Two traces of a pullback are two tree structures of the same leaves.
    first = gather.fetch(_take(parameters, 0))
    shapes, structure = jax.tree.flatten(jax.eval_shape(layer, 0, x, first)[1])
    y, saved = jax.tree.unflatten(structure, _unwritten(last + 1, shapes))
    kept = jax.tree.leaves((y, placed(saved)))
    _, x, _, kept = lax.while_loop(lambda state: state[0] <= last, step, (0, x, first, kept))
    y, saved = jax.tree.unflatten(structure, kept)
    return (x, y), (shared, of_layer, parameters, totals, saved)


def _backward(body: Body, gather: LayerGather, remat: Remat, kept, gradients):
    shared, of_layer, parameters, totals, saved = kept
    dx, dy = gradients
    last = jax.tree.leaves(parameters)[0].shape[0] - 1
    offload = remat == "offload"

    def restored(i):
        """What layer i saved, from the host's memory a layer ahead of its use."""
        return _in_memory(jax.memory.Space.Device, _take(saved, i)) if offload else None

    def step(state):
        turn, dx, fetched, of_this, leaving, arrived, staying, totals = state
        i = last - turn
        following = jnp.maximum(i - 1, 0)
        sent, of_following = gather.send(_take(parameters, following)), restored(following)
        sent_back = gather.send_gradients(leaving)
        of_this = of_this if offload else _take(saved, i)
        layer = gather.layer(_take(parameters, i), fetched)
        if remat:
            arguments = shared, _take(of_layer, i), of_this, layer, _take(totals, i)
            _, pullback = jax.vjp(body, *arguments, in_nzs=(False, False, True, True, True))
            # What is computed again hides one way, its gradients the other. And dx: experts elsewhere would be sent it before
            # the tokens that are needed first.
            (pullback, dx), sent = gather.behind((pullback, dx), sent)
        else:
            arguments = shared, _take(of_layer, i), of_this.args_res[2], layer, _take(totals, i)
            pullback = of_this.replace(args_res=list(arguments))
        _, _, dx, dlayer, dtotals = pullback((dx, _take(dy, i)))
        leaving, own = gather.split(dlayer)
        (dx, leaving), (sent, sent_back) = gather.behind((dx, leaving), (sent, sent_back))
        # In the first turn zeros, which the second one overwrites.
        arrived = _put(arrived, gather.receive_gradients(sent_back, arrived), jnp.minimum(i + 1, last))
        return (
            turn + 1,
            dx,
            gather.receive(sent),
            of_following,
            leaving,
            arrived,
            _put(staying, own, i),
            _put(totals, dtotals, i),
        )

    fetched = gather.fetch(_take(parameters, last))
    arrived, staying = gather.split(_unwritten(last + 1, _take(parameters, 0)))
    state = 0, dx, fetched, restored(last), jax.tree.map(jnp.zeros_like, fetched), arrived, staying, totals
    _, dx, _, _, leaving, arrived, staying, totals = lax.while_loop(lambda state: state[0] <= last, step, state)
    arrived = _put(arrived, gather.receive_gradients(gather.send_gradients(leaving), arrived), 0)
    return None, None, dx, gather.join(parameters, arrived, staying), totals


_run_layers.defvjp(_forward, _backward)


def _in_memory(space: jax.memory.Space, arrays):
    return jax.tree.map(lambda a: jax.device_put(a, space), arrays)


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
