"""The experts for callers inside this package: checks a call, refuses what does not combine, and computes it (`fused_vjp`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from moe_jax.kernels import backends
from moe_jax.kernels.backends import implementation, resolve_backend
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.changed import of_each_expert, rank_alignment
from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, RoundedTokens
from moe_jax.kernels.experts.fused_vjp import ExpertsOperands, experts_of_parts
from moe_jax.kernels.experts.routing import is_an_expert
from moe_jax.kernels.experts.separate_vjps import ExpertsOptions
from moe_jax.kernels.experts.weights import Accumulators, ExpertProducts, ExpertWeights, Matrix
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import check_experts_mlp, check_shape, refuse_explicit_axes, vary_alike, varying_axes


class TokenPart(NamedTuple):
    """A group of tokens with their routing, computed as one unit."""

    x: Float[Array, "tokens hidden"] | RoundedTokens
    """Already rounded tokens need `precision`."""
    topk_weights: Float[Array, "tokens k"]
    topk_experts: Integer[Array, "tokens k"]


REFUSED: tuple[tuple[set[str], str], ...] = (
    ({"biases", "precision"}, "biases need precision=None: experts with biases multiply in x's dtype, not in FP8"),
    ({"bias of down", "max_pairs"}, "biases are added to the outputs of all pairs: give max_pairs=None"),
    ({"one in FP8"}, "w_gate_up and w_down must both be arrays or both be QuantisedMatrices; got one of each"),
    (
        {"in FP8 alone", "no precision"},
        "QuantisedMatrices need precision=Precision(), which multiplies them in FP8; got precision=None",
    ),
    ({"rounded tokens", "no precision"}, "tokens that were rounded to FP8 need precision=Precision(); got precision=None"),
    ({"rounded tokens", "chunks"}, "tokens that were rounded to FP8 are not cut into chunks: give chunk_tokens=None"),
    ({"rounded tokens", "changes"}, "low-rank changes multiply tokens in bf16, which these, rounded to FP8, no longer are"),
    ({"several parts", "chunks"}, "tokens come in several parts or in chunks: give chunk_tokens=None"),
    ({"one change"}, "both matrices have a low-rank change or neither; got one"),
    *(
        ({"changes", other}, "matrices with a low-rank change are frozen: give frozen=True")
        for other in ("own gradients", "accumulators", "ticket")
    ),
    ({"stack", "own gradients"}, "a layer of a stack gets no gradient of its own: give accumulators, or frozen=True"),
    ({"frozen", "accumulators"}, "frozen matrices have no gradients that accumulators could grow by"),
    ({"frozen", "ticket"}, "frozen matrices have no gradients that a ticket could hold"),
    ({"ticket", "stack"}, "a ticket is of one layer: give the layer's own matrices"),
    ({"ticket", "chunks"}, "a ticket holds the operands of all tokens: give chunk_tokens=None"),
    ({"ticket", "several parts"}, "a ticket holds the operands of one part"),
    ({"ticket", "rounded tokens"}, "weight tickets hold tokens in bf16, which these, rounded to FP8, no longer are"),
)
"""Combinations that a call refuses, each with its reason. Everything else combines."""


def experts(
    parts: Sequence[TokenPart],
    weights: ExpertWeights,
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    max_pairs: Sequence[int | None] | None = None,
    shares: Sequence[int | None] | None = None,
    precision: Precision | None = None,
    activation: Activation = SILU,
) -> tuple[Float[Array, "_ hidden"], ...]:
    """Computes `experts_mlp` for several groups of tokens one after another, so that transfers of later groups overlap.

    A part waits for its own tokens and for earlier parts. Its y is available before later parts are computed; gradients have
    the same order. The first part, the caller's own tokens, is the exception: its down pass comes last. So there is something
    to compute while the other parts' outputs travel. The weights' gradients come at the end, each summed over all parts in f32
    in one pass and rounded once.

    Differentiable in the tokens, topk_weights and `ExpertWeights.trained`. Each kernel adds to an accumulator in the same
    memory if the caller donates or carries it. The accumulator of an expert without tokens does not change. With low-rank
    changes b a the matrices are w + b a. In FP8 the product of a matrix and that of its change are each rounded to bf16, and
    added.

    Args:
        weights: matrices without FP8 copies are rounded in each pass, once for all parts.
        backend, chunk_tokens, precision, activation: as in `experts_mlp`.
        max_pairs: for each part, the number of ids in [0, E) to make room for: R is max_pairs instead of T*K. Ids beyond it
            count as ids outside [0, E), the last experts' first. None: room for all.
        shares: for each part, the number of devices that its tokens come from, equally many from each. The part's y and dx are
            computed in this number of equal pieces, one by one. So pieces to send need not be copied out of the whole. None:
            nothing is sent.

    Raises:
        ValueError: there are no parts; parts differ in more than their numbers of tokens; or max_pairs or shares has another
            length than parts. Also if shares do not divide the tokens, and as `experts_mlp`. Accumulators or factors do not fit
            the matrices, or accumulators are equal on devices that differ in x. A combination is in `REFUSED`.
    """
    if weights.down.change is not None and not weights.keeps_residuals and not backends.is_interpreted():
        # The factors of each expert, with padded ranks, are made again in the backward pass: they would be residuals.
        given: Any = dict(backend=backend, chunk_tokens=chunk_tokens, max_pairs=max_pairs, shares=shares)
        call = partial(experts, **given, precision=precision, activation=activation)
        policy = jax.checkpoint_policies.save_only_these_names("experts")
        return jax.checkpoint(call, policy=policy, prevent_cse=False)(parts, replace(weights, keeps_residuals=True))
    _check_positive("chunk_tokens", chunk_tokens)
    if chunk_tokens is not None and len(parts) == 1 and chunk_tokens >= parts[0].x.shape[0]:
        chunk_tokens = None
    if not isinstance(activation, Activation):
        raise ValueError(f"activation must be an Activation, for example Activation(limit=7.0); got {activation!r}")
    found = combination(parts, weights, precision, chunk_tokens, max_pairs)
    sizes = _checked_sizes(parts, weights)
    is_plain = len(parts) == 1 and max_pairs is None and shares is None
    max_pairs = [None] * len(parts) if max_pairs is None else max_pairs
    shares = [None] * len(parts) if shares is None else shares
    if not is_plain:
        _check_parts(parts, max_pairs, shares)
    of_tokens = parts[0].x.dtype, sizes["hidden"], sizes["inter"]
    fp8 = None if precision is None else resolve_fp8_backend(backend, *of_tokens, precision)
    backend = resolve_backend(backend, *of_tokens) if fp8 is None else fp8.sums
    row_alignment = implementation(backend).ROW_ALIGNMENT if fp8 is None else fp8.row_alignment
    matrices = _matrices(weights, sizes, backend) if found & {"changes", "in FP8 alone"} else (weights.gate_up, weights.down)
    gate_up, down, whole_parts = vary_alike((*matrices, tuple(parts)))
    if isinstance(weights.gradient, Accumulators):
        axes = "experts" if weights.layer is None else "layers experts"
        _check_accumulators(weights.gradient, of_tokens[0], varying_axes((gate_up, down, whole_parts)), sizes, axes)
    xs, topk_weights, topk_experts = zip(*whole_parts, strict=True)
    pairs = zip(topk_weights, topk_experts, strict=True)
    known = tuple(jnp.where(is_an_expert(ids, sizes["experts"]), of_ids, 0) for of_ids, ids in pairs)
    is_frozen = weights.frozen or "in FP8 alone" in found
    varying = replace(weights, gate_up=gate_up, down=replace(down, bias=None), frozen=is_frozen)
    operands = ExpertsOperands(xs, varying, known, topk_experts)
    how = tuple(max_pairs), tuple(shares), chunk_tokens, fp8, activation, row_alignment
    options = ExpertsOptions(backend, sizes["experts"], *how)
    if isinstance(weights.gradient, ExpertProducts):
        for name, wanted in (("row_alignment", row_alignment), ("max_pairs", max_pairs[0])):
            if (got := getattr(weights.gradient, name)) != wanted:
                raise ValueError(
                    f"the ticket must come from expert_products_like with this call's backend, precision and max_pairs: "
                    f"{name} is {wanted}; got {got}"
                )
    ys = experts_of_parts(operands, options)
    if down.bias is None:
        return ys
    triples = zip(ys, topk_weights, topk_experts, strict=True)
    return tuple((widened(y) + sums_of_biases(down.bias, *choices)).astype(y.dtype) for y, *choices in triples)


def sums_of_biases(
    bias: Float[Array, "experts hidden"], topk_weights: Float[Array, "tokens k"], topk_experts: Integer[Array, "tokens k"]
) -> Float[Array, "tokens hidden"]:
    """Computes sum_k topk_weights[t, k] * bias[e], in at least f32: a matmul with each token's weight of each expert."""
    is_chosen = topk_experts[:, :, None] == jnp.arange(len(bias), dtype=jnp.int32)
    weights = jnp.sum(jnp.where(is_chosen, widened(topk_weights)[:, :, None], 0), axis=1)
    return jnp.matmul(weights, widened(bias), precision="highest")


def combination(
    parts: Sequence[TokenPart],
    weights: ExpertWeights,
    precision: Precision | None,
    chunk_tokens: int | None = None,
    max_pairs: Sequence[int | None] | None = None,
) -> set[str]:
    """Returns the features (words in `REFUSED`) that a call combines.

    Raises:
        ValueError: the combination is refused.
    """
    matrices, gradient = (weights.gate_up, weights.down), weights.gradient
    alone = [matrix.values is None for matrix in matrices]
    changes = [matrix.change is not None for matrix in matrices]
    words = {
        "biases": any(matrix.bias is not None for matrix in matrices),
        "bias of down": weights.down.bias is not None,
        "one in FP8": any(alone) and not all(alone),
        "in FP8 alone": all(alone),
        "precision": precision is not None,
        "no precision": precision is None,
        "copies": any(matrix.in_fp8 is not None for matrix in matrices),
        "one change": any(changes) and not all(changes),
        "changes": all(changes),
        "own gradients": gradient is None and not weights.frozen and not all(alone),
        "frozen": weights.frozen or all(alone),
        "accumulators": isinstance(gradient, Accumulators),
        "ticket": isinstance(gradient, ExpertProducts),
        "stack": weights.layer is not None,
        "several parts": len(parts) > 1,
        "rounded tokens": any(isinstance(part.x, RoundedTokens) for part in parts),
        "chunks": chunk_tokens is not None,
        "max_pairs": max_pairs is not None and any(pairs is not None for pairs in max_pairs),
    }
    found = {word for word, is_true in words.items() if is_true}
    refuse(found, REFUSED)
    return found


def refuse(found: set[str], table: Sequence[tuple[set[str], str]]) -> None:
    """Raises a ValueError with the reason in the first table row whose words are all in `found`."""
    for refused, why in table:
        if refused <= found:
            raise ValueError(why)


def _checked_sizes(parts: Sequence[TokenPart], weights: ExpertWeights) -> dict[str, int]:
    """Returns the length of each axis."""
    axes = "experts" if weights.layer is None else "layers experts"
    matrices: Any = (weights.gate_up, weights.down)
    w_gate_up, w_down = (w.in_fp8.rounded.values if w.values is None else w.values for w in matrices)
    sizes: dict[str, int] = {}
    for part in parts:
        x = part.x.like if isinstance(part.x, RoundedTokens) else part.x
        sizes = check_experts_mlp(x, w_gate_up, w_down, part.topk_weights, part.topk_experts, experts=axes)
        refuse_explicit_axes(x=x, topk_weights=part.topk_weights, topk_experts=part.topk_experts)
    refuse_explicit_axes(w_gate_up=w_gate_up, w_down=w_down)
    for name, matrix, axes in (("gate_up", weights.gate_up, "experts 2*inter"), ("down", weights.down, "experts hidden")):
        if matrix.bias is not None:
            check_shape(f"biases: b_{name}", matrix.bias, axes, sizes)
            refuse_explicit_axes(**{f"b_{name}": matrix.bias})
    for name, matrix in (("gate_up", weights.gate_up), ("down", weights.down)):
        if matrix.in_fp8 is not None:
            _check_scales(f"w_{name}", matrix.in_fp8.rounded)
    return sizes


def _check_scales(name: str, codes: QuantisedMatrices) -> None:
    *stack, n, k = codes.values.shape
    if tuple(codes.scales.shape) != (*stack, n // GROUP, k // GROUP):
        raise ValueError(
            f"{name}.scales must have shape {[*stack, n // GROUP, k // GROUP]}, one for each {GROUP} x {GROUP} of "
            f"{list(codes.values.shape)}; got {list(codes.scales.shape)}"
        )


def _check_parts(parts: Sequence[TokenPart], max_pairs: Sequence[int | None], shares: Sequence[int | None]) -> None:
    types = [", ".join(f"{a.dtype}[tokens, {a.shape[1]}]" for a in part) for part in parts]
    if len(set(types)) != 1:
        raise ValueError(f"parts must be one or more, all of the same dtypes and widths; got {'; '.join(types) or 'none'}")
    if len(max_pairs) != len(parts):
        raise ValueError(f"max_pairs must have one entry for each of the {len(parts)} parts; got {len(max_pairs)}")
    tokens = [part.x.shape[0] for part in parts]
    fit = [n is None or (n >= 1 and not of_part % n) for of_part, n in zip(tokens, shares, strict=False)]
    if len(shares) != len(parts) or not all(fit):
        raise ValueError(
            f"shares must have one entry for each part, a divisor of its tokens; got {list(shares)} for {tokens} tokens"
        )
    for pairs in max_pairs:
        _check_positive("max_pairs", pairs)


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 or None; got {value}")


def _matrices(weights: ExpertWeights, sizes: dict[str, int], backend: str) -> list[Matrix]:
    """Checks the matrices' low-rank factors, and returns them per expert with ranks padded to what the backend supports."""
    alignment = rank_alignment(backend, sizes["hidden"], sizes["inter"])
    made = []
    for name, matrix, (num_out, num_in) in (
        ("gate_up", weights.gate_up, ("2*inter", "hidden")),
        ("down", weights.down, ("hidden", "inter")),
    ):
        if matrix.change is not None:
            own = dict(sizes)
            for factor, array, axes in (("a", matrix.change.a, f"rank {num_in}"), ("b", matrix.change.b, f"{num_out} rank")):
                first = "1" if array.shape[:1] == (1,) else "experts"
                check_shape(f"{name}.change.{factor}", array, f"{first} {axes}", own | {"1": 1})
                own["rank"] = matrix.change.a.shape[1]
            matrix = replace(matrix, change=of_each_expert(matrix.change, sizes["experts"], alignment))
        if matrix.values is None:
            matrix = replace(matrix, in_fp8=jax.tree.map(_refuse_gradient, matrix.in_fp8))
        made.append(matrix)
    return made


@jax.custom_vjp
def _refuse_gradient(a: Array) -> Array:
    """Returns the array, and refuses to be differentiated: matrices that exist only in FP8 are frozen."""
    return a


def _refuse(a: Array) -> tuple[Array, None]:
    raise ValueError(
        "matrices in FP8 get no gradient: give the bf16 or f32 weights to train them, or differentiate in x and topk_weights "
        "alone"
    )


_refuse_gradient.defvjp(_refuse, lambda _, gradient: (gradient,))


def _check_accumulators(
    accumulators: Accumulators, dtype: jnp.dtype, axes: frozenset[str], sizes: dict[str, int], experts: str
) -> None:
    """Checks accumulators for tokens of this dtype; tokens and weights vary over these mesh axes."""
    given = {"gate_up": accumulators.gate_up, "down": accumulators.down}
    if any(array is None for array in given.values()):
        found = ["None" if array is None else str(list(array.shape)) for array in given.values()]
        raise ValueError(f"accumulators must be two arrays, of w_gate_up's and of w_down's shape; got {', '.join(found)}")
    wanted = at_least_f32(dtype)
    shapes = {"gate_up": f"{experts} 2*inter hidden", "down": f"{experts} hidden inter"}
    for matrix, array in given.items():
        name = f"accumulators.{matrix}"
        check_shape(name, array, shapes[matrix], sizes)
        if array.dtype != wanted:
            raise ValueError(f"{name} must have dtype {wanted.name}, in which gradients are summed; got {array.dtype}")
        if missing := sorted(axes - varying_axes(array)):
            raise ValueError(f"{name} must vary over the mesh axes {missing}, as tokens or weights do: a device adds its own")
