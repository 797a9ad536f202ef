"""Variants of `experts_mlp` for callers inside this package; they have its formula and its gradients.

`layers/moe.py` calls `experts_mlp_accumulating`: micro-batches then add their weight gradients to given arrays in place.
It calls `experts_mlp_in_stack` where layers run one by one and read their weights inside the stack of all layers.
It calls `experts_mlp_frozen` where the matrices are not trained.
`parallel/expert/one_round.py` calls `experts_mlp_of_parts`: the tokens of other devices arrive later than a device's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.choose_backend import resolve_backend
from moe_jax.kernels.experts.fp8.passes import Fp8Options, QuantisedExperts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fp8.rounded import RoundedWeights, weights_and_copies
from moe_jax.kernels.experts.fp8.rounded_tokens import RoundedTokens, of_gradient
from moe_jax.kernels.experts.fused_vjp import ExpertsOperands, ExpertsOptions, Matrices, experts_of_parts
from moe_jax.kernels.experts.routing import is_an_expert
from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import check_experts_mlp, check_shape
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike, varying_axes


class Accumulators(NamedTuple):
    """The sums of earlier micro-batches' weight gradients, in f32 (f64 for f64)."""

    gate_up: Float[Array, "experts 2*inter hidden"]
    down: Float[Array, "experts hidden inter"]
    in_stack: bool = False
    """True if both are slices of stacked arrays, and `lax.dynamic_update_slice` writes their gradients back to the same place.

    `layers.passes` does so, and the kernels then work inside the stack. Other slices must be copied first: XLA would let a
    kernel change the slice itself and take the result from elsewhere.
    """
    layer: Int[Array, ""] | None = None
    """If given, the weights and both sums are whole stacks [layers, experts, ...], of which a call uses this layer.

    The kernels then read and write inside the stacks, whatever the index is computed from. Of other slices than those of a
    loop's counter XLA makes copies: for the experts of Qwen3-30B-A3B 14 GB a layer and micro-batch.
    """


def experts_mlp_accumulating(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "*layers experts 2*inter hidden"],
    w_down: Float[Array, "*layers experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    accumulators: Accumulators | None,
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    activation: Activation = SILU,
    gate_up_bias: Float[Array, "experts 2*inter"] | None = None,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp`; with `accumulators`, its weight gradients are added to them.

    y does not depend on the accumulators. Their gradient is the new sum, accumulators + the weight gradients of this call,
    unrounded. The weights then have no gradient of their own (zero):

        def loss(accumulators, x, ...):
            y = experts_mlp_accumulating(x, w_gate_up, w_down, ..., Accumulators(*accumulators))
        accumulators = jax.grad(loss)(accumulators, x, ...)  # accumulators + d loss / d (w_gate_up, w_down)

    Each kernel adds to the accumulator in the same memory if the caller donates or carries it. The accumulator of an expert
    without tokens stays as it is.

    The gradient of y must reach the accumulators by one call alone: two calls would add them twice. A `vmap` over tokens is
    several calls. So is `shard_map`: inside it each device has accumulators of its own, to be summed over devices at the end.

    Raises:
        ValueError: what `experts_mlp` raises; accumulators of another shape or dtype; or accumulators that are equal on devices
            that differ in x.
    """
    layer = None if accumulators is None else accumulators.layer
    experts = "experts" if layer is None else "layers experts"
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, experts=experts)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    check_positive("chunk_tokens", chunk_tokens)
    if chunk_tokens is not None and chunk_tokens >= x.shape[0]:
        chunk_tokens = None
    backend = resolve_backend(backend, x.dtype, x.shape[1], sizes["inter"])
    *arrays, gate_up_bias = vary_alike((x, w_gate_up, w_down, topk_weights, topk_experts, gate_up_bias))
    if accumulators is not None:
        check_accumulators(accumulators, arrays, sizes, experts)
    x, w_gate_up, w_down, topk_weights, topk_experts = arrays
    into, in_stack = None, False
    if accumulators is not None:
        into, in_stack = Matrices(accumulators.gate_up, accumulators.down), accumulators.in_stack
    topk_weights = without_strangers(topk_weights, topk_experts, sizes["experts"])
    operands = ExpertsOperands((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), into, layer, None, gate_up_bias)
    options = ExpertsOptions(
        backend, (None,), chunk_tokens=chunk_tokens, accumulators_in_stack=in_stack, activation=activation
    )  # fmt: skip
    return experts_of_parts(operands, options)[0]


def experts_mlp_frozen(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp` with matrices that are not trained: their gradient is zero, and no product is made for one.

    Raises:
        ValueError: what `experts_mlp` raises.
    """
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts)
    refuse_explicit_axes(x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights, topk_experts=topk_experts)
    check_positive("chunk_tokens", chunk_tokens)
    if chunk_tokens is not None and chunk_tokens >= x.shape[0]:
        chunk_tokens = None
    backend = resolve_backend(backend, x.dtype, x.shape[1], sizes["inter"])
    x, w_gate_up, w_down, topk_weights, topk_experts = vary_alike((x, w_gate_up, w_down, topk_weights, topk_experts))
    topk_weights = without_strangers(topk_weights, topk_experts, sizes["experts"])
    operands = ExpertsOperands((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), None)
    options = ExpertsOptions(backend, (None,), chunk_tokens=chunk_tokens, frozen=True, activation=activation)
    return experts_of_parts(operands, options)[0]


def experts_mlp_in_stack(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "layers experts 2*inter hidden"],
    w_down: Float[Array, "layers experts hidden inter"],
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    layer: Int[Array, ""],
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp` with the experts of one layer of a stack, which kernels read in place. It has no gradients.

    Raises:
        ValueError: what `experts_mlp` raises.
    """
    sizes = check_experts_mlp(x, w_gate_up, w_down, topk_weights, topk_experts, experts="layers experts")
    backend = resolve_backend(None, x.dtype, x.shape[1], sizes["inter"])
    topk_weights = without_strangers(topk_weights, topk_experts, sizes["experts"])
    operands = ExpertsOperands((x,), w_gate_up, w_down, (topk_weights,), (topk_experts,), None, layer)
    return experts_of_parts(operands, ExpertsOptions(backend, (None,), activation=activation))[0]


class TokenPart(NamedTuple):
    """A group of tokens and their choices."""

    x: Float[Array, "tokens hidden"] | RoundedTokens
    """Tokens that were rounded before need `precision`."""
    topk_weights: Float[Array, "tokens k"]
    topk_experts: Integer[Array, "tokens k"]


def experts_mlp_of_parts(
    parts: Sequence[TokenPart],
    w_gate_up: Float[Array, "*layers experts 2*inter hidden"] | RoundedWeights | QuantisedMatrices,
    w_down: Float[Array, "*layers experts hidden inter"] | RoundedWeights | QuantisedMatrices,
    accumulators: Accumulators | None = None,
    *,
    layer: Int[Array, ""] | None = None,
    backend: str | None = None,
    max_pairs: Sequence[int | None] | None = None,
    shares: Sequence[int] | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, "_ hidden"], ...]:
    """Computes `experts_mlp` of several groups of tokens, one after the other, where some arrive later than others.

    A part waits for its own tokens and for the parts before it. Its y is there before later parts are computed; the gradients
    follow the same order. The first part, the caller's own tokens, is the exception: its down pass comes last. So there is
    something to compute while the other parts' outputs travel. The weights' gradients come at the end, each summed over all
    parts in f32 in one pass and rounded once.

    Args:
        w_gate_up, w_down: as in `experts_mlp`, or both rounded before, with `precision`. `QuantisedMatrices` are frozen.
        accumulators: as in `experts_mlp_accumulating`.
        layer: as in `experts_mlp_in_stack`, and not beside accumulators, which have one of their own.
        max_pairs: for each part, the number of ids in [0, E) to make room for: R is max_pairs instead of T*K. Ids beyond it
            count as ids outside [0, E), the last experts' first. None: room for all.
        shares: for each part, the number of devices that its tokens come from, equally many from each (default: 1). The part's
            y and dx are made in this number of equal pieces, one by one. So no piece that is sent is copied out of the whole.
        precision: as in `experts_mlp`; each pass rounds the weights once for all parts.

    Raises:
        ValueError: there are no parts; parts differ in more than their numbers of tokens; or max_pairs or shares has another
            length than parts. Also if shares do not divide the tokens, and as `experts_mlp`.
    """
    weights: Matrices | None = None
    quantised: QuantisedExperts | None
    if isinstance(w_gate_up, QuantisedMatrices) and isinstance(w_down, QuantisedMatrices):
        quantised = QuantisedExperts(w_gate_up, w_down)
        shaped = Matrices(w_gate_up.values, w_down.values)
    else:
        shaped, quantised = weights_and_copies(w_gate_up, w_down)
        weights = shaped
    refuse_explicit_axes(w_gate_up=shaped.gate_up, w_down=shaped.down)
    is_frozen = weights is None or layer is not None
    layer = layer if accumulators is None else accumulators.layer
    experts = "experts" if layer is None else "layers experts"
    sizes: dict[str, int] = {}
    for part in parts:
        x = of_gradient(part.x)
        sizes = check_experts_mlp(x, *shaped, part.topk_weights, part.topk_experts, experts=experts)
        refuse_explicit_axes(**(part._asdict() | {"x": x}))
    types = [", ".join(f"{a.dtype}[tokens, {a.shape[1]}]" for a in part) for part in parts]
    if len(set(types)) != 1:
        raise ValueError(f"parts must be one or more, all of the same dtypes and widths; got {'; '.join(types) or 'none'}")
    max_pairs = [None] * len(parts) if max_pairs is None else max_pairs
    if len(max_pairs) != len(parts):
        raise ValueError(f"max_pairs must have one entry for each of the {len(parts)} parts; got {len(max_pairs)}")
    shares = [1] * len(parts) if shares is None else shares
    if len(shares) != len(parts) or any(n < 1 or part.x.shape[0] % n for part, n in zip(parts, shares, strict=True)):
        tokens = [part.x.shape[0] for part in parts]
        raise ValueError(
            f"shares must have one entry for each part, a divisor of its tokens; got {list(shares)} for {tokens} tokens"
        )
    for pairs in max_pairs:
        check_positive("max_pairs", pairs)
    fp8, of_tokens = None, (parts[0].x.dtype, sizes["hidden"], sizes["inter"])
    if precision is not None:
        fp8 = Fp8Options.of(precision, backend, *of_tokens)
    backend = resolve_backend(backend, *of_tokens) if fp8 is None else fp8.sums
    parts, weights, quantised = vary_alike((tuple(parts), weights, quantised))
    into, in_stack = None, False
    if accumulators is not None:
        check_accumulators(accumulators, (of_gradient(parts[0].x), shaped.gate_up), sizes, experts)
        into, in_stack = Matrices(accumulators.gate_up, accumulators.down), accumulators.in_stack
    operands = ExpertsOperands(
        xs=tuple(part.x for part in parts),
        w_gate_up=None if weights is None else weights.gate_up,
        w_down=None if weights is None else weights.down,
        weights=tuple(without_strangers(part.topk_weights, part.topk_experts, sizes["experts"]) for part in parts),
        experts=tuple(part.topk_experts for part in parts),
        accumulators=into,
        layer=layer,
        quantised=quantised,
    )
    options = ExpertsOptions(
        backend, tuple(max_pairs), tuple(shares), accumulators_in_stack=in_stack, frozen=is_frozen, fp8=fp8
    )  # fmt: skip
    return experts_of_parts(operands, options)


def check_positive(name: str, value: int | None) -> None:
    """Raises a ValueError for a number below 1."""
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 or None; got {value}")


def check_accumulators(accumulators: Accumulators, arrays: Sequence[Array], sizes: dict[str, int], experts: str) -> None:
    """Checks sums for a call with these arrays, of which x is the first, and these axes.

    Raises:
        ValueError: another shape or dtype, or sums that are equal on devices that differ in an array.
    """
    given = {"gate_up": accumulators.gate_up, "down": accumulators.down}
    if any(array is None for array in given.values()):
        found = ["None" if array is None else str(list(array.shape)) for array in given.values()]
        raise ValueError(f"accumulators must be two arrays, of w_gate_up's and of w_down's shape; got {', '.join(found)}")
    wanted = at_least_f32(arrays[0].dtype)
    axes = varying_axes(arrays)
    shapes = {"gate_up": f"{experts} 2*inter hidden", "down": f"{experts} hidden inter"}
    for matrix, array in given.items():
        name = f"accumulators.{matrix}"
        check_shape(name, array, shapes[matrix], sizes)
        if array.dtype != wanted:
            raise ValueError(f"{name} must have dtype {wanted.name}, in which gradients are summed; got {array.dtype}")
        if missing := sorted(axes - varying_axes(array)):
            raise ValueError(f"{name} must vary over the mesh axes {missing}, as tokens or weights do: a device adds its own")


def without_strangers(
    weights: Float[Array, "tokens k"], topk_experts: Integer[Array, "tokens k"], num_experts: int
) -> Float[Array, "tokens k"]:
    """Zeroes the weights of ids outside [0, E): these weights may be NaN, and later steps multiply them by zeros."""
    return jnp.where(is_an_expert(topk_experts, num_experts), weights, 0)
