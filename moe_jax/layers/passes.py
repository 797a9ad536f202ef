"""Runs equal layers, stacked along a leading axis, in turn: like `lax.scan`, but its gradient writes no memory twice.

`lax.scan` fills every stacked array with zeros before its loop writes into it. For the gradients of Qwen3-30B-A3B's experts
that is 58 GB, more than a third of a backward pass over few tokens. Here those arrays are only allocated, each layer's part is
written once, and a layer's weights are reread from the stack. Each pass is a `layers.loops.Loop`, alone or joined with another.

With n layers, one turn of each loop does the following. A parameter gather and a gradient scatter (`parallel.fsdp.LayerGather`)
start before the layer computes, and are waited for after it. The layer's kernels hide them.

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
| after the loop | | own parts of the gradients of layer 0 | gradients of layer 0 |

In the last turn a layer is gathered whose result nothing reads: the last layer forward, layer 0 backward. In the first backward
turn zeros are scattered, which the second turn overwrites. Without remat the backward pass of layer i hides the gather too.
With "offload", the saved input of layer i - 1 is copied from the host's memory in the turn of layer i.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.loops import Loop, Pass, Turn, run_pass

Body = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""A layer: (x, y) = body(shared, per_layer, x, parameters, accumulators)."""

Remat = bool | Literal["offload"]
"""True recomputes a layer in the backward pass from its input; "offload" keeps that input in the host's memory."""


@dataclass(frozen=True)
class WholeLayer:
    """The no-op counterpart of `parallel.fsdp.LayerGather`: parameters are replicated, so nothing is communicated."""

    def gather(self, parts) -> list[Any]:
        """Returns the full parameters of a layer from this device's shards; replicated leaves are left out."""
        return self.finish_gather(self.start_gather(parts))

    def start_gather(self, parts) -> list:
        """Starts the all-gather of the layer's parameters; pass the result to `finish_gather`."""
        return []

    def finish_gather(self, arriving: list) -> list[Any]:
        """Waits for the all-gather and returns the full parameters."""
        return []

    def barrier(self, computed, arriving):
        """Returns both arguments unchanged; a gather may order its transfer after `computed`."""
        return computed, arriving

    def layer(self, parts, gathered: list[Any]):
        """Combines gathered leaves with the replicated leaves of `parts` into the layer's parameters."""
        return parts

    @property
    def of_gradients(self) -> "WholeLayer":
        """The gather of only the leaves with gradients, for `split` and `join` of gradients, and the scatter."""
        return self

    def zero_gradients(self, gathered: list[Any]) -> list[Array]:
        """Returns zeros for `start_scatter`, in the shapes of the gathered parameters' gradients."""
        return []

    def start_scatter(self, gradients: list[Array]) -> list:
        """Starts the reduce-scatter of gradients of gathered parameters; pass the result to `finish_scatter`."""
        return []

    def finish_scatter(self, arriving: list, like: list[Array]) -> list[Array]:
        """Waits for the reduce-scatter and returns the gradients of this device's shards, in the dtypes of `like`."""
        return []

    def split(self, tree) -> tuple[list[Array], list[Array]]:
        """Returns (gathered leaves, replicated leaves)."""
        return [], jax.tree.leaves(tree)

    def join(self, tree, gathered: list[Any], whole: list[Array]):
        """Inverts `split`; `tree` defines the structure."""
        return jax.tree.unflatten(jax.tree.structure(tree), whole)


WHOLE_LAYER = WholeLayer()


class Layers(NamedTuple):
    """The static description of stacked layers: body, parameter gather and recomputation. Holds no arrays."""

    body: Body
    gather: WholeLayer = WHOLE_LAYER
    remat: Remat = False
    num_kept: int = 0
    """Number of last layers that keep their residuals, while the stack's other layers are recomputed."""
    keep: tuple[str, ...] = ()
    """The parts of residuals that the recomputed layers keep: names of `jax.ad_checkpoint.checkpoint_name` in the body."""
    whole_accumulators: bool = False
    """True: the body gets the whole stacks of accumulators, and adds to its layer's slice. False: it gets only its layer's."""

    def of_loop(self, remat: Remat) -> "Layers":
        """Returns the layers of one loop: with `remat` those that are recomputed, else those that keep all residuals.

        To keep parts, the body recomputes the others itself. Its residuals are x and the parts, as if none were recomputed.
        """
        if not (remat and self.keep):
            return self._replace(remat=remat)
        policy = jax.checkpoint_policies.save_only_these_names(*self.keep)
        # The passes are separate loops, so XLA cannot merge the recomputation with the forward pass.
        return self._replace(body=jax.checkpoint(self.body, policy=policy, prevent_cse=False), remat=False)

    def take_accumulators(self, stacks, i: Turn):
        """Returns the accumulators that the body of layer i reads: its slice, or the whole stacks."""
        return stacks if self.whole_accumulators else take_layer(stacks, i)

    def put_accumulators(self, stacks, after, i: Turn):
        """Returns the stacks updated with the accumulators that the body of layer i returned."""
        return after if self.whole_accumulators else put_layer(stacks, after, i)


class LayerArrays(NamedTuple):
    """The arrays that the forward and backward pass read, as in `run_layers`."""

    shared: Any
    per_layer: Any
    parameters: Any
    accumulators: Any = None
    frozen: Any = None
    """Weights without gradients that are gathered like parameters. With any, the body gets (frozen, *per_layer)."""

    @property
    def num_layers(self) -> int:
        """The number of stacked layers."""
        return jax.tree.leaves((self.parameters, self.per_layer))[0].shape[0]

    @property
    def parts(self) -> tuple[Any, Any]:
        """The arrays that a gather reads: the parameters, and the frozen weights."""
        return self.parameters, self.frozen

    def inputs(self, per_layer, frozen):
        """Returns the input of the body that has no gradient, from a layer's arrays."""
        return per_layer if frozen is None else (frozen, *per_layer)


class Chunk(NamedTuple):
    """A range of consecutive layers in a stack, for a pass over only some of them."""

    first: Turn
    """The index of the first layer; may be traced."""
    num_layers: int
    first_accumulator: int = 0
    """The index of its first layer in the accumulators."""


class SavedPlace(NamedTuple):
    """Preallocated stacks that a forward pass writes its residuals to, and the first index to write."""

    stacks: list[Array]
    """For each leaf of `SavedLayers`, an array with a leading axis for the layers of several passes."""
    first: Turn
    """The index of the first layer of the pass; may be traced."""


SavedLayers = Any
"""The arrays that the forward pass saves for the backward pass, stacked: with remat each layer's x, else the residuals of each
layer's pullback."""


class ForwardRun(NamedTuple):
    """The result of a forward pass."""

    x: Any
    """The output of the last layer."""
    y: Any
    """The other outputs of all layers, stacked."""
    saved: SavedLayers


@partial(jax.custom_vjp, nondiff_argnums=(0,))
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
    body, gather, last = layers.body, layers.gather, arrays.num_layers - 1

    def step(state, arguments):
        x, gathered = state
        i, own, parts, own_accumulators = arguments
        arriving = gather.start_gather(take_layer(arrays.parts, jnp.minimum(i + 1, last)))
        of_layer, of_frozen = gather.layer(parts, gathered)
        x, y = body(arrays.shared, arrays.inputs(own, of_frozen), x, of_layer, own_accumulators)
        x, arriving = gather.barrier(x, arriving)
        return (x, gather.finish_gather(arriving)), y

    first = gather.gather(take_layer(arrays.parts, 0))
    scanned = jnp.arange(last + 1), arrays.per_layer, arrays.parts, arrays.accumulators
    (x, _), y = lax.scan(step, (x, first), scanned)
    return x, y


def _forward(layers: Layers, arrays: LayerArrays, x):
    run = run_pass(forward_pass(layers, arrays, x))
    return (run.x, run.y), (arrays, run.saved)


def _backward(layers: Layers, residuals: tuple[LayerArrays, SavedLayers], gradients):
    run = run_pass(backward_pass(layers, *residuals, *gradients))
    return LayerArrays(None, None, run.parameters, run.accumulators), run.dx


run_layers.defvjp(_forward, _backward)


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


class ForwardState(NamedTuple):
    """The loop carry of the forward pass before iteration i, which computes layer i."""

    x: Any
    """The input of layer i."""
    gathered: list[Any]
    """The gathered parameters of layer i."""
    y: list[Array]
    """The leaves of `ForwardRun.y`, written up to layer i - 1. Leaves: two traces of a pullback differ in structure."""
    saved: list[Array]
    """The leaves of `ForwardRun.saved`, written up to layer i - 1."""


def forward_loop(layers: Layers, arrays: LayerArrays, x, chunk: Chunk | None = None, place: SavedPlace | None = None) -> Loop:
    """Returns the forward pass; its result is a `ForwardRun`, stacked over the layers of the chunk.

    Args:
      chunk: the layers to run; None: all.
      place: where to save; the result's `saved` are then the leaves `place.stacks`, with this pass written into them. None:
        separate arrays for this pass.
    """
    body, gather, remat = layers.body, layers.gather, layers.remat
    last = (arrays.num_layers if chunk is None else chunk.num_layers) - 1
    placed = partial(_in_memory, jax.memory.Space.Host) if remat == "offload" else lambda arrays: arrays
    first_saved = 0 if place is None else place.first

    def layer(i, x, gathered):
        here = _place(chunk, i)
        own = (
            take_layer(arrays.per_layer, here),
            take_layer(arrays.parts, here),
            layers.take_accumulators(arrays.accumulators, _accumulator(chunk, i)),
        )
        parameters, frozen = gather.layer(own[1], gathered)
        arguments = arrays.shared, arrays.inputs(own[0], frozen), x, parameters, own[2]
        if remat:
            after, y = body(*arguments)
            return after, (y, placed(x))
        (after, y), pullback = _pullback(body, arguments)
        return after, (y, placed(pullback))

    def step(i: Turn, state: ForwardState) -> ForwardState:
        arriving = gather.start_gather(take_layer(arrays.parts, _place(chunk, jnp.minimum(i + 1, last))))
        x, results = layer(i, state.x, state.gathered)
        x, arriving = gather.barrier(x, arriving)
        y, saved = map(jax.tree.leaves, results)
        y, saved = put_layer(state.y, y, i), put_layer(state.saved, saved, first_saved + i)
        return ForwardState(x, gather.finish_gather(arriving), y, saved)

    first = gather.gather(take_layer(arrays.parts, _place(chunk, 0)))
    (y, of_y), (saved, of_saved) = map(jax.tree.flatten, jax.eval_shape(layer, 0, x, first)[1])
    stacks = placed(unwritten(last + 1, saved)) if place is None else place.stacks

    def finish(state: ForwardState) -> ForwardRun:
        saved = jax.tree.unflatten(of_saved, state.saved) if place is None else state.saved
        return ForwardRun(state.x, jax.tree.unflatten(of_y, state.y), saved)

    start = ForwardState(x, first, unwritten(last + 1, y), stacks)
    return Loop("forward", last + 1, start, step, finish)


class BackwardRun(NamedTuple):
    """The result of a backward pass."""

    dx: Any
    """The gradient of the input of layer 0."""
    parameters: Any
    """The gradients of the parameters, stacked."""
    accumulators: Any
    """The accumulators with the gradients that the body added."""


class BackwardState(NamedTuple):
    """The loop carry of the backward pass before the iteration that computes layer i = last - turn."""

    dx: Any
    """The gradient of the output of layer i."""
    gathered: list[Any]
    """The gathered parameters of layer i."""
    restored: Any
    """The residuals of layer i, copied from the host's memory; None without "offload"."""
    to_scatter: list[Array]
    """The gradients of the gathered parameters of layer i + 1, of only this device's tokens; zeros in the first turn."""
    scattered: list[Array]
    """The gradients of this device's parts of gathered parameters, stacked, written from layer i + 2 on."""
    whole: list[Array]
    """The gradients of the parameters that are not gathered, stacked, written from layer i + 1 on."""
    accumulators: Any
    """The accumulators, stacked, with the gradients from layer i + 1 on added."""


def backward_loop(
    layers: Layers, arrays: LayerArrays, saved: SavedLayers, dx, dy, sums=None, chunk: Chunk | None = None, written=None
) -> Loop:
    """Returns the backward pass; its result is a `BackwardRun`, whose gradients are stacked over all layers.

    Args:
      saved: from the forward pass over the same layers and inputs.
      dx, dy: the gradients of `ForwardRun.x` and `ForwardRun.y`.
      sums: arrays like the parameters, to which the gradients are added in the sums' dtype and memory. None: gradients have the
        parameters' dtypes and their own memory.
      chunk: the layers to run; `saved` and `dy` cover only these layers, gradients and sums all layers. None: all.
      written: without `sums`, the gradients of earlier layers' runs, into which the chunk's are written.
    """
    body, gather, remat, parameters = layers.body, layers.gather, layers.remat, arrays.parameters
    of_gradients = gather.of_gradients
    last = (arrays.num_layers if chunk is None else chunk.num_layers) - 1
    offload = remat == "offload"
    write = put_layer if sums is None else add_layer

    def restored(i):
        """Copies layer i's residuals from the host's memory, one layer ahead of their use."""
        return _in_memory(jax.memory.Space.Device, take_layer(saved, i)) if offload else None

    def step(turn: Turn, state: BackwardState) -> BackwardState:
        i = last - turn
        here, below = _place(chunk, i), jnp.maximum(i - 1, 0)
        arriving, restored_below = gather.start_gather(take_layer(arrays.parts, _place(chunk, below))), restored(below)
        scattering = of_gradients.start_scatter(state.to_scatter)
        of_layer = state.restored if offload else take_layer(saved, i)
        (layer, frozen), dx = gather.layer(take_layer(arrays.parts, here), state.gathered), state.dx
        of_kernels = _accumulator(chunk, i)
        inputs = arrays.inputs(take_layer(arrays.per_layer, here), frozen)
        own = inputs, layers.take_accumulators(state.accumulators, of_kernels)
        if remat:
            if last == 0:
                # XLA unrolls a loop of one layer. It would recompute the layer before dx is known, during later layers' passes.
                of_layer, dx = lax.optimization_barrier((of_layer, dx))
            _, pullback = _pullback(body, (arrays.shared, own[0], of_layer, layer, own[1]))
            # Recomputation hides the parameter gather, the backward pass hides the gradient scatter. dx is in the barrier too:
            # otherwise expert parallelism sends it before the tokens that are needed first. Parameters are not: a barrier
            # makes XLA copy each slice of a stack that passes it.
            (pullback, dx), arriving = gather.barrier((pullback, dx), arriving)
        else:
            pullback = of_layer
        pullback = pullback.replace(args_res=[arrays.shared, own[0], pullback.args_res[2], layer, own[1]])
        _, _, dx, dlayer, daccumulators = pullback((dx, take_layer(dy, i)))
        to_scatter, whole = of_gradients.split(dlayer)
        (dx, to_scatter), (arriving, scattering) = gather.barrier((dx, to_scatter), (arriving, scattering))
        # In the first turn these are zeros, in a slice that the second turn overwrites or adds to.
        arrived = of_gradients.finish_scatter(scattering, state.scattered)
        return BackwardState(
            dx=dx,
            gathered=gather.finish_gather(arriving),
            restored=restored_below,
            to_scatter=to_scatter,
            scattered=write(state.scattered, arrived, _place(chunk, jnp.minimum(i + 1, last))),
            whole=write(state.whole, whole, here),
            accumulators=layers.put_accumulators(state.accumulators, daccumulators, of_kernels),
        )

    def finish(state: BackwardState) -> BackwardRun:
        of_first = of_gradients.finish_scatter(of_gradients.start_scatter(state.to_scatter), state.scattered)
        scattered = write(state.scattered, of_first, _place(chunk, 0))
        return BackwardRun(state.dx, of_gradients.join(parameters, scattered, state.whole), state.accumulators)

    gathered = gather.gather(take_layer(arrays.parts, _place(chunk, last)))
    if sums is None:
        sums = unwritten(arrays.num_layers, take_layer(parameters, 0)) if written is None else written
    scattered, whole = of_gradients.split(sums)
    start = BackwardState(
        dx=dx,
        gathered=gathered,
        restored=restored(last),
        to_scatter=of_gradients.zero_gradients(gathered),
        scattered=scattered,
        whole=whole,
        accumulators=arrays.accumulators,
    )
    return Loop("backward", last + 1, start, step, finish)


def _place(chunk: Chunk | None, i: Turn) -> Turn:
    """Returns the index in the stack of layer i of the chunk."""
    return i if chunk is None else chunk.first + i


def _accumulator(chunk: Chunk | None, i: Turn) -> Turn:
    """Returns the index in the accumulators of layer i of the chunk."""
    return i if chunk is None else chunk.first_accumulator + i


def _pullback(body: Body, arguments: tuple):
    """Returns the layer's outputs, and its pullback without its arguments except x: the caller puts them into `args_res`.

    Parameters are not residuals: the backward pass reads them from the stack. A copy of each layer's would double them.
    """
    return jax.vjp(body, *arguments, saveable_args=(False, False, True, False, False), in_nzs=(False, False, True, True, True))


def _in_memory(space: jax.memory.Space, arrays):
    return jax.tree.map(lambda a: jax.device_put(a, space), arrays)


def take_layer(stacked, i):
    """Slices layer i from every stacked array; gradients of integers have no values to slice."""

    def take(a):
        if a.dtype == jax.dtypes.float0:
            return np.zeros(a.shape[1:], a.dtype)
        part = lax.dynamic_slice(a, (i, *[0] * (a.ndim - 1)), (1, *a.shape[1:]), allow_negative_indices=False)
        return part.reshape(a.shape[1:])

    return jax.tree.map(take, stacked)


def put_layer(stacked, layer, i):
    """Returns the stacked arrays with layer i replaced by `layer`."""

    def put(a, part):
        # With an index that may count from the end, XLA would not see that a kernel can write its result here, and would copy.
        return lax.dynamic_update_slice(a, part[None], (i, *[0] * part.ndim), allow_negative_indices=False)

    return jax.tree.map(put, stacked, layer)


def add_layer(sums, layer, i):
    """Returns the stacked sums with `layer` added to layer i, in the sums' dtype and memory."""

    def add(a, part):
        # The slice keeps the axis of layers. If it were reshaped, XLA would copy it before the sum: 5 % of a step (f32 sums of
        # 64 experts' matrices, 8192 tokens, two H100).
        start = (i, *[0] * part.ndim)
        before = lax.dynamic_slice(a, start, (1, *part.shape), allow_negative_indices=False)
        return lax.dynamic_update_slice(a, before + part[None].astype(a.dtype), start, allow_negative_indices=False)

    return jax.tree.map(add, sums, layer)


def unwritten(num_layers: int, like):
    """Allocates uninitialized stacks of `num_layers` arrays with the shapes and dtypes of `like`."""
    # XLA would not split an allocation over devices: each device would allocate the whole array. Zeros it splits.
    splits = jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
    empty = jnp.zeros if splits else lax.empty
    return jax.tree.map(lambda a: vary_as(empty((num_layers, *a.shape), a.dtype), a), like)
