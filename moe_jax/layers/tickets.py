"""The backward pass over stacked layers in two halves: B computes the gradients of inputs, W the gradients of weights.

The gradient of a weight matrix is a product: dW = dy^T x for y = x W^T. A weight's *ticket* is an argument of the same matmul.
The ticket's values are never read, and its "gradient" is the operands of the product, here x and dy. A `GradientAccumulator`
works the same way: its "gradient" is the new sum.

    defer_weight_gradients(stage, x)                    every matrix of the stacked layers gets a ticket
    inputs_backward(layers, arrays, saved, dx, dy)      B: dx, the gradients of vectors, and the operands of all products
    weights_backward(products, sums)                    W: sums with the gradients of matrices added, at any later time

B and W together cost as many FLOPs as the undivided backward pass. Vectors (norms, biases) have no ticket: B computes their
gradients. W is the pass of zero-bubble schedules (https://arxiv.org/abs/2401.10241) that fills the time in which a rank waits.
Operands are large: for Qwen3-30B-A3B 82 KiB per token and layer in bf16, 20 times x.
"""

from functools import partial

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.kernels.experts.deferred import add_expert_products
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.linear import DeferredWeight, LinearProduct, TicketHolder, WeightTicket
from moe_jax.layers.loops import Loop, Turn
from moe_jax.layers.moe import EXPERT_MATRICES, Experts
from moe_jax.layers.passes import (
    Chunk,
    LayerArrays,
    Layers,
    SavedLayers,
    add_layer,
    backward_loop,
    put_layer,
    take_layer,
    unwritten,
)
from moe_jax.layers.spread import ONE_DEVICE, OneDevice


def defer_weight_gradients(
    layers: nnx.Module, x: Float[Array, "*batch hidden"], spread: OneDevice = ONE_DEVICE, number: int = 0
) -> None:
    """Assigns a ticket to every matrix of stacked layers that is whole on each device, in place.

    The module must be merged for a single call, as for `moe.add_expert_gradients_to`. The gradient of a matrix that a mesh
    gathers layer by layer travels while B computes the next layer, so B computes it.

    Args:
      x: an input of the layers or its shape; all later inputs must have its leading axes.
      number: the stage's index in `Decoder.stages`.
    """
    gather, params = spread.gather(number), nnx.to_flat_state(nnx.state(layers, nnx.Param))
    gathers = [()] * len(params) if gather is None else gather.gathers
    gathered = {path[:-1] for (path, _), how in zip(params, gathers, strict=True) if how}
    modules = list(nnx.iter_modules(layers))
    flattening = [path for path, module in modules if getattr(module, "flattens_tokens", False)]
    flat = jax.eval_shape(lambda x: x.reshape(-1, x.shape[-1]), x)
    for path, module in modules:
        if isinstance(module, TicketHolder) and path not in gathered:
            _take_ticket(module, flat if any(path[: len(block)] == block for block in flattening) else x, spread)


def _take_ticket(module: TicketHolder, x: Float[Array, "*batch hidden"], spread: OneDevice) -> None:
    """Defers the gradients of a module's matrices, for inputs with x's leading axes and dtype."""
    products_like = partial(spread.products_like, module) if isinstance(module, Experts) else module.products_like
    like = jax.eval_shape(lambda x: vary_as(products_like(x), x), x)
    for name in module.matrices:
        matrix = getattr(module, name)
        setattr(module, name, DeferredWeight(matrix[...]))
    module.ticket = WeightTicket(unwritten(matrix.shape[0], like))


def inputs_backward(
    layers: Layers, arrays: LayerArrays, saved: SavedLayers, dx, dy, sums=None, chunk: Chunk | None = None
) -> Loop:
    """Runs B, the half of the backward pass that computes gradients of inputs and defers weight gradients.

    Its result's `parameters` are gradients of parameters without a ticket. `accumulators` are the operands of the gradients of
    all matrices, stacked, as `WeightTicket`s.

    Args:
      layers, arrays: `models.forward.stage_layers` of a stage whose matrices have tickets; the tickets are its accumulators.
      saved, dx, dy: as for `backward_loop`.
      sums: arrays like the parameters without a ticket, to which their gradients are added, as in `backward_loop`.
      chunk: as for `backward_loop`.
    """
    if chunk is not None:
        of_layer = jax.eval_shape(lambda: take_layer(arrays.accumulators, 0))
        arrays = arrays._replace(accumulators=unwritten(chunk.num_layers, of_layer))
    return backward_loop(layers, arrays, saved, dx, dy, sums, chunk)._replace(name="inputs_backward")


def weights_backward(products: nnx.State, sums: nnx.State, chunk: Chunk | None = None) -> Loop:
    """Runs W, the half of the backward pass that multiplies the deferred operands and adds to `sums`.

    The experts' kernels add to the sums without rounding. Gradients of other matrices are rounded to the dtype of the layers'
    inputs first, as in the undivided backward pass.

    Args:
      products: `accumulators` of the result of `inputs_backward`.
      sums: arrays like the layers' matrices, stacked, in f32 (f64 for f64), in the same layout. Others are unchanged.
      chunk: the layers of the products; None: all.
    """
    last = (jax.tree.leaves(products)[0].shape[0] if chunk is None else chunk.num_layers) - 1

    def step(turn: Turn, sums: nnx.State) -> nnx.State:
        of_product = last - turn
        i = of_product if chunk is None else chunk.first + of_product
        after = dict(nnx.to_flat_state(sums))
        for (*module, _), ticket in nnx.to_flat_state(take_layer(products, of_product)):
            product = ticket.get_value()
            if isinstance(product, LinearProduct):
                (path,) = places = [(*module, "weight")]
                added: tuple[Array, ...] = (add_layer(after[path][...], _multiply(product), i),)
            else:
                places = [(*module, name) for name in EXPERT_MATRICES]
                gate_up, down = (take_layer(after[path][...], i) for path in places)
                of_layer = add_expert_products(product, (gate_up, down))
                added = tuple(put_layer(after[path][...], part, i) for path, part in zip(places, of_layer, strict=True))
            for path, stacked in zip(places, added, strict=True):
                after[path] = after[path].replace(stacked)
        return nnx.from_flat_state(after.items())

    return Loop("weights_backward", last + 1, sums, step, lambda sums: sums)


def _multiply(product: LinearProduct) -> Float[Array, "out in"]:
    """Computes dy^T x, summed in dy's dtype and rounded to x's, in which the matrix was used.

    Leading axes are not merged, as in the undivided backward pass: over one axis of all tokens XLA would sum in another order.
    """
    x, dy = product
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(dy, x.astype(dy.dtype), ((leading, leading), ((), ()))).astype(x.dtype)
