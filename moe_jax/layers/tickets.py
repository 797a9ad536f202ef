"""The backward pass over stacked layers in two halves: B computes the gradients of inputs, W the gradients of weights.

The gradient of a weight matrix is a product: dW = dy^T x for y = x W^T. A weight's *ticket* is an argument of the same matmul.
The ticket's values are never read, and its "gradient" is the operands of the product, here x and dy. A `GradientAccumulator`
works alike: its "gradient" is the new sum.

    defer_weight_gradients(stage, x)                    every matrix of the stacked layers takes a ticket
    inputs_backward(layers, arrays, saved, dx, dy)      B: dx, the gradients of vectors, and the operands of all products
    weights_backward(products, sums)                    W: sums with the gradients of matrices added, at any later time

B and W together multiply as much as the undivided backward pass. Vectors (norms, biases) have no ticket: B computes their
gradients. W is the pass of zero-bubble schedules (https://arxiv.org/abs/2401.10241) that fills the time in which a rank waits.
Operands are large: for Qwen3-30B-A3B 82 KiB a token and layer in bf16, 20 times x.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.experts.deferred import add_expert_products
from moe_jax.kernels.experts.fp8.dense import DenseCopies, fp8_matmul
from moe_jax.kernels.experts.weights import ExpertProducts
from moe_jax.kernels.low_rank import Dropout, LowRank, low_rank_map
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.passes import (
    Chunk,
    LayerArrays,
    Layers,
    Loop,
    SavedLayers,
    Turn,
    add_layer,
    backward_loop,
    put_layer,
    take_layer,
    unwritten,
)


class WeightTicket(nnx.Variable):
    """Arrays with the shapes of a product's operands (`LinearProduct` or `ExpertProducts`), which are its "gradient"."""


class DeferredWeight(nnx.Variable):
    """A weight matrix whose gradient goes to a ticket or to accumulators; it has none of its own."""


class LinearProduct(NamedTuple):
    """The operands of the gradient dW = dy^T x of a linear map y = x W^T."""

    x: Float[Array, "*batch in"]
    dy: Float[Array, "*batch out"]


Product = LinearProduct | ExpertProducts

EXPERT_MATRICES = ("gate_up_proj", "down_proj")
"""The names of the matrices that share `ExpertProducts`, in the order of `ExpertWeights`."""


def is_expert_matrix(path: tuple) -> bool:
    """Returns True for the path of a matrix of experts, as the names of modules and parameter."""
    return path[-2:-1] == ("experts",) and path[-1] in EXPERT_MATRICES


class TicketHolder(nnx.Module):
    """A module with weight matrices, stacked along a leading axis of layers, that can take a ticket together.

    A subclass names its matrices in `matrices` and describes the products in `products_like`.
    """

    matrices: tuple[str, ...] = ("weight",)
    ticket: WeightTicket | None = None

    def products_like(self, x: Float[Array, "*batch hidden"]) -> Product:
        """Returns arrays like the operands of one layer's products, for tokens like x."""
        raise NotImplementedError

    def take_ticket(self, x: Float[Array, "*batch hidden"]) -> None:
        """Defers the gradients of the matrices, for inputs with x's leading axes and dtype."""
        like = jax.eval_shape(lambda x: vary_as(self.products_like(x), x), x)
        for name in self.matrices:
            matrix = getattr(self, name)
            setattr(self, name, DeferredWeight(matrix[...]))
        self.ticket = WeightTicket(unwritten(matrix.shape[0], like))

    @property
    def held_ticket(self) -> Any:
        """The ticket's arrays; None without a ticket."""
        return None if self.ticket is None else self.ticket.get_value()


def defer_weight_gradients(layers: nnx.Module, x: Float[Array, "*batch hidden"]) -> None:
    """Gives every matrix of stacked layers a ticket, in place.

    The module is one that was merged for a single call, as for `moe.add_expert_gradients_to`.

    Args:
      x: an input of the layers or its shape; its leading axes are those of all later inputs.
    """
    modules = list(nnx.iter_modules(layers))
    flattening = [path for path, module in modules if getattr(module, "flattens_tokens", False)]
    flat = jax.eval_shape(lambda x: x.reshape(-1, x.shape[-1]), x)
    for path, module in modules:
        if isinstance(module, TicketHolder):
            module.take_ticket(flat if any(path[: len(block)] == block for block in flattening) else x)


class TicketedMatrix(NamedTuple):
    """A matrix W [out, in], the arrays of its ticket, the change of an adapter and its dropout; None without these.

    With `in_fp8` W multiplies in FP8, as copies that it may hold.
    """

    weight: Float[Array, "out in"]
    ticket: LinearProduct | None
    change: LowRank | None = None
    dropout: Dropout | None = None
    in_fp8: DenseCopies | None = None


def linear_map(
    x: Float[Array, "*batch in"], matrix: TicketedMatrix, out_dtype: DTypeLike | None = None
) -> Float[Array, "*batch out"]:
    """Computes x W^T, W with its change, in x's dtype; `out_dtype` is the result's dtype, by default x's.

    Raises:
      ValueError: a matrix with a ticket that multiplies in FP8.
    """
    if matrix.in_fp8 is not None:
        if matrix.ticket is not None:
            raise ValueError("weight tickets hold operands in bf16: take precision 'bf16', or a schedule without tickets")
        y = fp8_matmul(x, matrix.weight, matrix.in_fp8)
    elif matrix.ticket is not None:
        return _with_ticket(x, matrix.weight, matrix.ticket, out_dtype)
    else:
        y = _linear_map(x, matrix.weight, out_dtype)
    return y if matrix.change is None else y + low_rank_map(x, matrix.change, out_dtype, matrix.dropout)


def linear_product_like(x: Float[Array, "*batch _"], matrix: nnx.Variable, out_dtype: DTypeLike) -> LinearProduct:
    """Returns arrays like the operands of a (stacked) matrix's gradient, for tokens with x's leading axes and dtype."""
    *_, num_out, num_in = matrix.shape
    return LinearProduct(jnp.zeros((*x.shape[:-1], num_in), x.dtype), jnp.zeros((*x.shape[:-1], num_out), out_dtype))


# The residuals are x and the weight, which is a parameter: a layer would keep a weight that is cast in a second array.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _linear_map(x: Array, weight: Array, out_dtype: DTypeLike | None) -> Array:
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_ticket(x: Array, weight: Array, ticket: LinearProduct, out_dtype: DTypeLike | None) -> Array:
    return _linear_map(x, weight, out_dtype)


def _with_ticket_forward(x: Array, weight: Array, ticket: LinearProduct, out_dtype: DTypeLike | None):
    return _linear_map(x, weight, out_dtype), (x, weight)


def _with_ticket_backward(out_dtype: DTypeLike | None, residuals: tuple[Array, Array], dy: Array):
    x, weight = residuals
    (dx,) = jax.linear_transpose(lambda x: _linear_map(x, weight, out_dtype), x)(dy)
    return dx, None, LinearProduct(x, dy)


_with_ticket.defvjp(_with_ticket_forward, _with_ticket_backward)


class InputsRun(NamedTuple):
    """The result of B, the first half of a backward pass."""

    dx: Any
    """The gradient of the input of layer 0."""
    vectors: Any
    """The gradients of the parameters without a ticket, stacked."""
    products: nnx.State
    """The operands of the gradients of all matrices, stacked, as `WeightTicket`s."""


def inputs_backward(
    layers: Layers, arrays: LayerArrays, saved: SavedLayers, dx, dy, sums=None, chunk: Chunk | None = None
) -> Loop:
    """Returns B of layers with tickets; its result is an `InputsRun`, whose products are those of the chunk's layers.

    Args:
      layers, arrays: `models.forward.stage_layers` of a stage whose matrices have tickets; these stand as the accumulators.
      saved, dx, dy: as for `backward_loop`.
      sums: arrays like the parameters without a ticket, to which their gradients are added; as for `backward_loop`.
      chunk: as for `backward_loop`.
    """
    if chunk is not None:
        of_layer = jax.eval_shape(lambda: take_layer(arrays.accumulators, 0))
        arrays = arrays._replace(accumulators=unwritten(chunk.num_layers, of_layer))
    loop = backward_loop(layers, arrays, saved, dx, dy, sums, chunk)
    return loop._replace(name="inputs_backward", finish=lambda state: InputsRun(*loop.finish(state)))


def weights_backward(products: nnx.State, sums: nnx.State, chunk: Chunk | None = None) -> Loop:
    """Returns W; its result is `sums` with the gradients of all matrices with a ticket added.

    The experts' kernels add to the sums without rounding. Gradients of other matrices are rounded to the dtype of the layers'
    inputs first, as in the undivided backward pass.

    Args:
      products: `InputsRun.products`.
      sums: arrays like the layers' matrices, stacked, in f32 (f64 for f64), laid out as these. Others are left as they are.
      chunk: the layers of the products; None: all.
    """
    last = jax.tree.leaves(products)[0].shape[0] - 1

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

    Leading axes stay apart, as in the undivided backward pass: over one axis of all tokens XLA would sum in another order.
    """
    x, dy = product
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(dy, x.astype(dy.dtype), ((leading, leading), ((), ()))).astype(x.dtype)
