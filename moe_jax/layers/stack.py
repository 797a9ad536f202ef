"""Runs equal layers, stacked along a leading axis, in turn: like `lax.scan`, but its gradient writes no memory twice.

`lax.scan` fills every stacked array with zeros before its loop writes into it. For the gradients of Qwen3-30B-A3B's experts
that is 58 GB, more than a third of a backward pass over few tokens. Here those arrays are only allocated, each layer's part is
written once, and a layer's weights are reread from the stack. `layers.passes` has the two loops.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.layers.loops import Pass, run_pass
from moe_jax.layers.passes import (
    BackwardRun,
    Chunk,
    ForwardRun,
    LayerArrays,
    Layers,
    Remat,
    SavedLayers,
    backward_loop,
    forward_loop,
    take_layer,
)


def run_layers(layers: Layers, arrays: LayerArrays, x):
    """Scans over stacked layers: x, y[l] = body(shared, per_layer[l], x, parameters[l], accumulators[l]).

    Returns the last x, and y stacked. Differentiable in x and parameters; each gradient has its argument's dtype. The residuals
    are the arrays that `body` needs for each layer. With `remat` they are x and `keep`, except in the last `num_kept` layers.
    Memory is the same as with `lax.scan`.

    With a `gather` that moves, inside `jax.shard_map`, `parameters` are a device's parts. While a layer computes, the
    parameters of the next layer are gathered. In the backward pass, the previous layer's gradients also travel to the devices
    that keep the parts. With peer-to-peer copies (`parallel.collectives.hops`) the layer hides both.

    Args:
      layers: the body, which closes over no array; the gather of parameters; and the recomputed layers.
      arrays: `shared`, `per_layer` and `frozen` are not differentiated. `body` returns each accumulator's "gradient": the array
        plus the added gradients (`kernels.experts.weights.Accumulators`). It overwrites the array.
      x: floats that are passed from layer to layer.
    """
    return _run_layers(layers, *arrays[:2], x, *arrays[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_layers(layers: Layers, shared, per_layer, x, parameters, accumulators, frozen):
    arrays = LayerArrays(shared, per_layer, parameters, accumulators, frozen)
    body, gather, last = layers.body, layers.gather, arrays.num_layers - 1

    def step(state, arguments):
        x, gathered = state
        i, own, parts, own_accumulators = arguments
        arriving = gather.start_gather(take_layer(arrays.parts, jnp.minimum(i + 1, last)))
        of_layer, of_frozen = gather.layer(parts, gathered)
        x, y = body(shared, arrays.inputs(own, of_frozen), x, of_layer, own_accumulators)
        x, arriving = gather.barrier(x, arriving)
        return (x, gather.finish_gather(arriving)), y

    first = gather.gather(take_layer(arrays.parts, 0))
    (x, _), y = lax.scan(step, (x, first), (jnp.arange(last + 1), per_layer, arrays.parts, accumulators))
    return x, y


def _forward(layers: Layers, shared, per_layer, x, parameters, accumulators, frozen):
    arrays = LayerArrays(shared, per_layer, parameters, accumulators, frozen)
    run = run_pass(forward_pass(layers, arrays, x))
    return (run.x, run.y), (arrays, run.saved)


def _backward(layers: Layers, residuals: tuple[LayerArrays, list[SavedLayers]], gradients):
    arrays, saved = residuals
    run = run_pass(backward_pass(layers, arrays, saved, *gradients))
    return None, None, run.dx, run.parameters, run.accumulators, None


_run_layers.defvjp(_forward, _backward)


def forward_pass(layers: Layers, arrays: LayerArrays, x) -> Pass:
    """Runs all layers forward: one loop over recomputed layers, one over layers that keep their residuals.

    The result is a `ForwardRun` whose `saved` holds what each loop saved.
    """
    outputs, saved = [], []
    for remat, chunk in parts_of(layers.remat, layers.num_kept, arrays.num_layers):
        run: ForwardRun = yield forward_loop(layers.of_loop(remat), arrays, x, chunk)
        x = run.x
        outputs.append(run.y)
        saved.append(run.saved)
    y = outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *of_parts: jnp.concatenate(of_parts), *outputs)
    return ForwardRun(x, y, saved)


def backward_pass(layers: Layers, arrays: LayerArrays, saved: list[SavedLayers], dx, dy, sums=None) -> Pass:
    """Runs all layers backward from the residuals that `forward_pass` saved; returns a `BackwardRun`."""
    adds, written = sums is not None, None
    parts = parts_of(layers.remat, layers.num_kept, arrays.num_layers)
    for (remat, chunk), of_part in reversed(list(zip(parts, saved, strict=True))):
        part = layers.of_loop(remat)
        own = dy if chunk is None else jax.tree.map(lambda a, c=chunk: a[c.first : c.first + c.num_layers], dy)
        run: BackwardRun = yield backward_loop(part, arrays, of_part, dx, own, sums, chunk, written)
        dx, arrays = run.dx, arrays._replace(accumulators=run.accumulators)
        sums, written = (run.parameters, None) if adds else (None, run.parameters)
    return run


def parts_of(remat: Remat, num_kept: int, num_layers: int) -> list[tuple[Remat, Chunk | None]]:
    """Returns the loops of a forward pass: each one's `remat` and its range of layers, None for all layers."""
    if not remat or not num_kept:
        return [(remat, None)]
    first = num_layers - num_kept
    if first <= 0:
        return [(False, None)]
    return [(remat, Chunk(0, first)), (False, Chunk(first, num_kept, first))]
