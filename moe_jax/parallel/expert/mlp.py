"""Computes the experts of a Mixture-of-Experts layer that are split over a mesh axis: `kernels.experts_mlp` on each device.

Tokens travel to the devices that hold their experts, and outputs travel home. That is one round (`one_round`). Tokens that find
no room in it take further ones (`rounds`). Choices of shadow experts (`shadow`) take no part in this exchange.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.experts import Fp8Matrices, experts_mlp_in_fp8, matrices_of
from moe_jax.kernels.experts.fp8.passes import QuantisedExperts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fp8.rounded import RoundedWeights, weights_and_copies
from moe_jax.kernels.experts.fused_vjp import Matrices
from moe_jax.kernels.experts.internal import Accumulators, TokenPart, experts_mlp_accumulating, experts_mlp_of_parts
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.shapes import check_experts_mlp
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.spread import Exchange
from moe_jax.parallel.expert.inputs import Choices, ExpertInputs, HeldExperts, held_experts
from moe_jax.parallel.expert.one_round import first_round
from moe_jax.parallel.expert.rounds import all_rounds
from moe_jax.parallel.expert.routes import further_rounds, in_first_round, owners, queue
from moe_jax.parallel.expert.settings import ExpertParallel, plan_exchange
from moe_jax.parallel.expert.shadow import compute_shadows
from moe_jax.parallel.mesh import axis_size


def expert_parallel_mlp(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "*layers local_experts 2*inter hidden"] | RoundedWeights | QuantisedMatrices,
    w_down: Float[Array, "*layers local_experts hidden inter"] | RoundedWeights | QuantisedMatrices,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    parallel: ExpertParallel,
    *,
    backend: str | None = None,
    accumulators: Accumulators | None = None,
    layer: Int[Array, ""] | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Computes `experts_mlp` of this device's tokens with the experts of all n devices of the axis, inside `jax.shard_map`.

    Each device passes its own tokens, their choices among all E experts, and the weights of its own E/n experts. Every device
    of the axis must call it with the same number of tokens.

    Differentiable in x, both weights and topk_weights. The gradient of a device's expert weights is the sum over the tokens of
    all devices. Each device sums its experts' outputs for a token in f32, and sends that sum in x's dtype. The token's own
    device sums the devices' contributions in f32. Two runs give the same bits.

    Ids outside [0, E) add nothing, as in `experts_mlp`. A token may choose an expert twice. On an axis of one device nothing
    travels and nothing is dropped.

    Args:
        w_gate_up, w_down: this device's experts; with `precision` both may have been rounded before. `QuantisedMatrices` are
            frozen: they get no gradients.
        accumulators: of this device's experts, as in `kernels.experts.internal.experts_mlp_accumulating`.
        layer: the weights are stacks of layers, of which the call uses this one; kernels read them in place. They are frozen.
        precision: as in `experts_mlp`. Outputs travel in x's dtype, and so do tokens without `parallel.tokens_in_fp8`.

    Raises:
        ValueError: shapes that do not fit together, more shadow_experts than experts, and errors of `experts_mlp`. Shadow
            experts with accumulators, rounded or frozen weights. Tokens or weights in FP8 without a precision.
        NameError: outside `shard_map`, or inside one whose mesh lacks the axis.
        NotImplementedError: shadow_experts under `jax.vmap`.
    """
    matrices_of(w_gate_up, w_down)  # refuses one of each kind
    (w_gate_up, w_down), quantised = weights_and_copies(w_gate_up, w_down)
    held = HeldExperts(w_gate_up, w_down, layer if accumulators is None else accumulators.layer)
    is_frozen = layer is not None or held.is_in_fp8
    experts_axes = "local_experts" if held.layer is None else "layers local_experts"
    sizes = check_experts_mlp(x, *held.arrays, topk_weights, topk_experts, experts=experts_axes)
    if held.is_in_fp8 and precision is None:
        raise ValueError("QuantisedMatrices are multiplied in FP8: give precision=Precision(); got precision=None")
    if parallel.tokens_in_fp8 and precision is None:
        raise ValueError(
            "tokens_in_fp8=True sends tokens as experts in FP8 multiply them: give precision=Precision(), or set_precision of "
            "the model; got precision=None"
        )
    if precision is not None:
        resolve_fp8_backend(backend, x.dtype, sizes["hidden"], sizes["inter"])
    devices = axis_size(parallel.axis_name)
    num_experts = devices * held.num_experts
    if parallel.shadow_experts and accumulators is not None:
        raise ValueError("shadow_experts move experts' gradients between devices, which accumulators cannot: take one of both")
    if parallel.shadow_experts and (quantised is not None or is_frozen):
        raise ValueError("shadow_experts copy weights to all devices, which must not be rounded or frozen: take one of both")
    if parallel.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts must be at most the {num_experts} experts; got {parallel.shadow_experts}")
    arguments = x, w_gate_up, w_down, topk_weights, topk_experts
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if topk_experts.size == 0:
        return vary_as(jnp.zeros_like(x), arguments), Exchange(none, one, none)
    if devices == 1:
        if is_frozen:
            part = TokenPart(x, topk_weights, topk_experts)
            (y,) = experts_mlp_of_parts([part], w_gate_up, w_down, layer=layer, backend=backend, precision=precision)
        elif precision is None:
            y = experts_mlp_accumulating(x, w_gate_up, w_down, topk_weights, topk_experts, accumulators, backend=backend)
        else:
            both = Fp8Matrices(Matrices(w_gate_up, w_down), quantised)
            y = experts_mlp_in_fp8(x, both, topk_weights, topk_experts, precision, backend=backend, accumulators=accumulators)
        return y, Exchange(none, one, none)

    experts = int32_ids(topk_experts, num_experts)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1)
    is_held = is_frozen or accumulators is not None
    sums = None if accumulators is None else Matrices(accumulators.gate_up, accumulators.down)
    gate_up, down = (None, None) if is_held else held.arrays
    inputs = ExpertInputs(x, gate_up, down, topk_weights, sums)
    everywhere = arguments, lax.axis_index(parallel.axis_name)
    inputs, experts, held, quantised = vary_as((inputs, experts, held, quantised), everywhere)
    if parallel.shadow_experts == 0:
        y, exchange = _exchange(parallel, backend, precision, inputs, experts, held if is_held else None, quantised)
        return y.astype(x.dtype), exchange
    shadows = compute_shadows(parallel, backend, precision, inputs, experts)
    y, exchange = _exchange(parallel, backend, precision, shadows.inputs, shadows.experts)
    return (y + shadows.y).astype(x.dtype), exchange._replace(num_shadows=shadows.num_shadows)


def _exchange(
    parallel: ExpertParallel,
    backend: str | None,
    precision: Precision | None,
    inputs: ExpertInputs,
    experts: Int[Array, "tokens k"],
    held: HeldExperts | None = None,
    quantised: QuantisedExperts | None = None,
) -> tuple[Float[Array, "tokens hidden"], Exchange]:
    """Returns what the experts of all devices add to this device's tokens, in at least f32, and the counts.

    There are no further rounds if buffers hold the worst routing, as with a `capacity_factor` of n. Then the host need not wait
    to learn their number.
    """
    devices, tokens = axis_size(parallel.axis_name), inputs.x.shape[0]
    local_experts = held_experts(inputs, held).num_experts
    plan = plan_exchange(tokens, experts.shape[1], devices, local_experts, parallel, backend, precision)
    owner = owners(experts, plan.num_experts, devices)
    queues = queue(owner, lax.stop_gradient(inputs.weights), devices, plan.first, parallel.drop or "position")
    # A buffer holds everything that one device can send to another, under any routing.
    holds_all = plan.first == (tokens, experts.size)
    is_first = owner >= 0 if holds_all else in_first_round(queues, owner)
    none, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    if parallel.drop is not None or holds_all:
        y = first_round(plan, Choices(none, queues, is_first, experts, held, quantised), inputs)
        return y, Exchange(jnp.sum((owner >= 0) & ~is_first, dtype=jnp.int32), one, none)
    rounds = further_rounds(queues, plan.further, parallel.axis_name)
    y = all_rounds(plan, Choices(rounds, queues, is_first, experts, held, quantised), inputs)
    return y, Exchange(none, 1 + rounds, none)
