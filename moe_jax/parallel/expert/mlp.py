"""Computes the experts of a Mixture-of-Experts layer that are split over a mesh axis: `kernels.experts_mlp` on each device.

Tokens are dispatched to the devices that hold their experts, and outputs return. That is one round (`one_round`). Tokens that
do not fit are dispatched in overflow rounds (`rounds`). Choices of shadow experts (`shadow`) are excluded from this exchange.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.call import TokenPart, combination, experts, refuse, sums_of_biases
from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.experts.weights import ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank
from moe_jax.kernels.shapes import check_experts_mlp, vary_as
from moe_jax.layers.spread import Exchange
from moe_jax.parallel.expert.one_round import Choices, ExpertInputs, first_round
from moe_jax.parallel.expert.rounds import all_rounds
from moe_jax.parallel.expert.routes import further_rounds, in_first_round, owners, queue
from moe_jax.parallel.expert.settings import NEEDS_ONE_CALL, ExpertParallel, plan_exchange
from moe_jax.parallel.expert.shadow import compute_shadows
from moe_jax.parallel.mesh import axis_size

REFUSED: tuple[tuple[set[str], str], ...] = (
    ({"biases", "drop"}, "a dropped choice would still add its bias: use drop=None"),
    ({"biases", "shadow_experts"}, "shadow_experts copy matrices without biases: use shadow_experts=0"),
    ({"ticket", "several calls"}, NEEDS_ONE_CALL),
    (
        {"tokens_in_fp8", "no precision"},
        "tokens_in_fp8=True sends tokens as experts in FP8 multiply them: give precision=Precision(), or set_precision of "
        "the model; got precision=None",
    ),
    ({"tokens_in_fp8", "changes"}, "low-rank changes multiply tokens in bf16: use tokens_in_fp8=False"),
    (
        {"shadow_experts", "accumulators"},
        "shadow_experts move experts' gradients between devices, which accumulators cannot: use one of both",
    ),
    *(
        (
            {"shadow_experts", other},
            "shadow_experts copy weights to all devices, which must not be rounded or frozen: use one of both",
        )
        for other in ("copies", "frozen")
    ),
)
"""Combinations that experts on several devices refuse in addition to `kernels.experts.call.REFUSED`, with reasons."""


def expert_parallel_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "*layers local_experts 2*inter hidden"] | QuantisedMatrices | Matrix,
    w_down: Float[Array, "*layers local_experts hidden inter"] | QuantisedMatrices | Matrix,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    parallel: ExpertParallel,
    *,
    backend: str | None = None,
    layer: Int[Array, ""] | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Computes `experts_mlp` with experts split over the n devices of a mesh axis, inside `jax.shard_map`.

    Each device passes its own tokens, their choices among all E experts, and the weights of its own E/n experts. Every device
    of the axis must call it with the same number of tokens.

    Differentiable in x, both weights and topk_weights. The gradient of a device's expert weights is the sum over the tokens of
    all devices. Each device sums its experts' outputs for a token in f32, and sends that sum in x's dtype. The token's own
    device sums the devices' contributions in f32. The result is deterministic.

    Ids outside [0, E) add nothing, as in `experts_mlp`. A token may choose an expert twice. On an axis of one device nothing
    travels and nothing is dropped.

    Args:
        w_gate_up, w_down: this device's experts. `QuantisedMatrices` are frozen: they get no gradients.
        layer: the weights are stacks of layers, and the call uses this one; kernels read it in place. They are frozen.
        precision: as in `experts_mlp`. Outputs travel in x's dtype, as do tokens without `parallel.tokens_in_fp8`.

    Raises:
        ValueError: shapes that do not match, more shadow_experts than experts, and errors of `experts_mlp`. Shadow
            experts with rounded or frozen weights. Tokens or weights in FP8 without a precision.
        NameError: outside `shard_map`, or inside one whose mesh lacks the axis.
        NotImplementedError: shadow_experts under `jax.vmap`.
    """
    weights = ExpertWeights.of(w_gate_up, w_down, layer=layer, frozen=layer is not None)
    part = TokenPart(x, topk_weights, topk_experts)
    return experts_of_devices(part, weights, parallel, backend=backend, precision=precision)


def experts_of_devices(
    part: TokenPart,
    weights: ExpertWeights,
    parallel: ExpertParallel,
    *,
    backend: str | None = None,
    precision: Precision | None = None,
    activation: Activation = SILU,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Computes `expert_parallel_mlp` for weights in any form that `ExpertWeights` supports (FP8, LoRA, accumulators).

    Args:
        weights: the factors of a low-rank change may also cover all E experts; each device then selects its own. Biases must
            cover all E experts.

    Raises:
        ValueError: as `expert_parallel_mlp`. A combination is in `REFUSED`.
        NameError, NotImplementedError: as `expert_parallel_mlp`.
    """
    words = combination([part], weights, precision)
    words |= {name for name in ("tokens_in_fp8", "shadow_experts", "drop") if getattr(parallel, name)}
    devices = axis_size(parallel.axis_name)
    if devices > 1 and not parallel.is_one_call(devices):
        words.add("several calls")
    refuse(words, REFUSED)
    x: Any = part.x
    topk_weights, topk_experts = part.topk_weights, part.topk_experts
    axes = "local_experts" if weights.layer is None else "layers local_experts"
    whole = weights.gate_up.whole, weights.down.whole
    sizes = check_experts_mlp(x, *whole, topk_weights, topk_experts, experts=axes)
    if precision is not None:
        resolve_fp8_backend(backend, x.dtype, sizes["hidden"], sizes["inter"])
    num_experts = devices * weights.num_experts
    if parallel.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts must be at most the {num_experts} experts; got {parallel.shadow_experts}")
    arguments = x, whole, topk_weights, topk_experts
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if topk_experts.size == 0:
        return vary_as(jnp.zeros_like(x), arguments), Exchange(none, one, none)
    if devices == 1:
        (y,) = experts([part], weights, backend=backend, precision=precision, activation=activation)
        return y, Exchange(none, one, none)

    bias_of_down = weights.down.bias
    weights = _of_device(weights, parallel.axis_name)
    ids = int32_ids(topk_experts, num_experts)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, -1)
    inputs = ExpertInputs(x, weights.trained(), topk_weights)
    everywhere = arguments, lax.axis_index(parallel.axis_name)
    inputs, ids, held = vary_as((inputs, ids, weights.held()), everywhere)
    if parallel.shadow_experts == 0:
        y, exchange = _exchange(parallel, backend, precision, activation, inputs, ids, held)
        if bias_of_down is not None:
            # Added where the token is: no bias travels.
            y = y + sums_of_biases(bias_of_down, topk_weights, ids)
        return y.astype(x.dtype), exchange
    of_shadows, num_shadows, inputs, ids = compute_shadows(parallel, backend, precision, activation, inputs, ids)
    y, exchange = _exchange(parallel, backend, precision, activation, inputs, ids, held)
    return (y + of_shadows).astype(x.dtype), exchange._replace(num_shadows=num_shadows)


def _of_device(weights: ExpertWeights, axis_name: str) -> ExpertWeights:
    """Returns the weights with only the factors and first biases of this device's experts, without biases of down."""
    held = weights.num_experts

    def own(factor: Array) -> Array:
        if len(factor) != held * axis_size(axis_name):
            return factor
        return lax.dynamic_slice_in_dim(factor, lax.axis_index(axis_name) * held, held)

    def of_matrix(matrix: Matrix) -> Matrix:
        bias = None if matrix.bias is None or matrix is weights.down else own(matrix.bias)
        change = None if matrix.change is None else LowRank(*map(own, matrix.change))
        return replace(matrix, bias=bias, change=change)

    return weights.with_each(of_matrix)


def _exchange(
    parallel: ExpertParallel,
    backend: str | None,
    precision: Precision | None,
    activation: Activation,
    inputs: ExpertInputs,
    ids: Int[Array, "tokens k"],
    held: ExpertWeights,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Returns the outputs of all devices' experts for this device's tokens, in at least f32, and the counts.

    There are no further rounds if buffers hold the worst routing, as with a `capacity_factor` of n. Devices then need not agree
    on their number.
    """
    devices, tokens = axis_size(parallel.axis_name), inputs.x.shape[0]
    local_experts = held.with_trained(inputs.trained).num_experts
    plan = plan_exchange(tokens, ids.shape[1], devices, local_experts, parallel, backend, precision)
    plan = plan._replace(activation=activation)
    owner = owners(ids, plan.num_experts, devices)
    queues = queue(owner, lax.stop_gradient(inputs.weights), devices, plan.first, parallel.drop or "position")
    # A buffer holds everything that one device can send to another, under any routing.
    holds_all = plan.first == (tokens, ids.size)
    is_first = owner >= 0 if holds_all else in_first_round(queues, owner)
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if parallel.drop is not None or holds_all:
        y = first_round(plan, Choices(none, queues, is_first, ids, held), inputs)
        return y, Exchange(jnp.sum((owner >= 0) & ~is_first, dtype=jnp.int32), one, none)
    rounds = further_rounds(queues, plan.further, parallel.axis_name)
    y = all_rounds(plan, Choices(rounds, queues, is_first, ids, held), inputs)
    return y, Exchange(none, 1 + rounds, none)
