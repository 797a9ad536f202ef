"""`experts_mlp` in FP8, for callers inside this package; `fused_vjp` has both passes, `Precision` the recipe."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.passes import Fp8Options, QuantisedExperts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices
from moe_jax.kernels.experts.fused_vjp import ExpertsOperands, ExpertsOptions, Matrices, experts_of_parts
from moe_jax.kernels.experts.internal import Accumulators, check_accumulators, check_positive, without_strangers
from moe_jax.kernels.shapes import check_experts_mlp
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike


class Fp8Matrices(NamedTuple):
    """The experts' matrices: weights, their copies in FP8, or both."""

    weights: Matrices | None
    """The weights, which get the gradients; stacks of layers if the accumulators have a layer. None: there are none."""
    quantised: QuantisedExperts | None = None
    """Copies of the weights, made before; None: each pass makes them of the weights. Without weights they are frozen."""
    frozen: bool = False
    """The weights get no gradients, and no products are made for any."""
    layer: Int[Array, ""] | None = None
    """If given, the matrices are stacks of layers, of which a call uses this one, without gradients."""


def experts_mlp_in_fp8(
    x: Float[Array, "tokens hidden"],
    matrices: Fp8Matrices,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    precision: Precision,
    *,
    accumulators: Accumulators | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp` with products in FP8; accumulators are those of `experts_mlp_accumulating`.

    Raises:
        ValueError: what `experts_mlp_accumulating` raises; an x that is not bf16; sizes that are no multiples of 128; or
            matrices in FP8 without weights that are differentiated.
    """
    weights, quantised, frozen, layer = matrices
    if accumulators is not None:
        layer = accumulators.layer
    sizes = checked_sizes(x, matrices._replace(layer=layer), topk_weights, topk_experts)
    check_positive("chunk_tokens", chunk_tokens)
    if chunk_tokens is not None and chunk_tokens >= x.shape[0]:
        chunk_tokens = None
    fp8 = Fp8Options.of(precision, backend, x.dtype, x.shape[1], sizes["inter"])
    if weights is None:
        quantised = jax.tree.map(refuse_gradient, quantised)
    arrays = vary_alike((x, weights, quantised, topk_weights, topk_experts))
    into, in_stack = None, False
    if accumulators is not None:
        check_accumulators(accumulators, jax.tree.leaves(arrays), sizes, "experts" if layer is None else "layers experts")
        into, in_stack = Matrices(accumulators.gate_up, accumulators.down), accumulators.in_stack
    x, weights, quantised, topk_weights, topk_experts = arrays
    topk_weights = without_strangers(topk_weights, topk_experts, sizes["experts"])
    of_weights = (None, None) if weights is None else (weights.gate_up, weights.down)
    operands = ExpertsOperands(
        (x,), of_weights[0], of_weights[1], (topk_weights,), (topk_experts,), into, layer, quantised
    )  # fmt: skip
    options = ExpertsOptions(
        fp8.sums,
        (None,),
        chunk_tokens=chunk_tokens,
        accumulators_in_stack=in_stack,
        frozen=frozen or weights is None,
        fp8=fp8,
        activation=activation,
    )
    return experts_of_parts(operands, options)[0]


def checked_sizes(x: Array, matrices: Fp8Matrices, topk_weights: Array, topk_experts: Array) -> dict[str, int]:
    """Returns the length of each axis.

    Raises:
        ValueError: shapes that do not fit together, or arrays that are split over mesh axes of type Explicit.
    """
    w_gate_up, w_down = _whole(matrices)
    experts = "experts" if matrices.layer is None else "layers experts"
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, experts=experts)
    if matrices.quantised is not None:
        _check_scales(matrices.quantised)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    return sizes


def _whole(matrices: Fp8Matrices) -> Matrices:
    """Returns arrays with the shapes of the whole matrices."""
    if matrices.weights is not None:
        return matrices.weights
    assert matrices.quantised is not None
    return Matrices(matrices.quantised.gate_up.values, matrices.quantised.down.values)


def _check_scales(quantised: QuantisedExperts) -> None:
    for name, matrices in zip(quantised._fields, quantised, strict=True):
        if matrices is None:
            continue
        *stack, n, k = matrices.values.shape
        if tuple(matrices.scales.shape) != (*stack, n // GROUP, k // GROUP):
            raise ValueError(
                f"{name}.scales must have shape {[*stack, n // GROUP, k // GROUP]}, one for each {GROUP} x {GROUP} of "
                f"{list(matrices.values.shape)}; got {list(matrices.scales.shape)}"
            )


@jax.custom_vjp
def refuse_gradient(a: Array) -> Array:
    """Returns the array, and refuses to be differentiated: FP8 matrices without weights are frozen."""
    return a


def _refuse(a: Array) -> tuple[Array, None]:
    raise ValueError(
        "matrices in FP8 get no gradient: give the bf16 or f32 weights to train them, or differentiate in x and topk_weights "
        "alone"
    )


refuse_gradient.defvjp(_refuse, lambda _, gradient: (gradient,))


def matrices_of(w_gate_up: Any, w_down: Any) -> Fp8Matrices:
    """Returns the arguments of `experts_mlp` as matrices: two arrays, or two `QuantisedMatrices`.

    Raises:
        ValueError: one of each.
    """
    kinds = [isinstance(w, QuantisedMatrices) for w in (w_gate_up, w_down)]
    if all(kinds):
        return Fp8Matrices(None, QuantisedExperts(w_gate_up, w_down))
    if any(kinds):
        raise ValueError("w_gate_up and w_down must both be arrays or both be QuantisedMatrices; got one of each")
    return Fp8Matrices(Matrices(w_gate_up, w_down))
