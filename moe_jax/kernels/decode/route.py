"""A router's choice for each token: softmax over the experts, the k largest, and their weights.

Kernel `route_rows`: one warpgroup per block and token, experts distributed over its threads; k rounds of argmax.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, row_layout, sum_of_splits
from moe_jax.kernels.hopper.launch import launch


class TokenChoices(NamedTuple):
    """Each token's chosen experts and weights. Only the first k columns are valid."""

    weights: Float[Array, "tokens experts"]
    experts: Int[Array, "tokens experts"]
    is_chosen: Int[Array, "tokens experts"]
    """1 for each expert that a valid token chose, else 0."""


@partial(jax.jit, static_argnames=("k", "divide_by_sum"))
def route_rows(
    splits: Float[Array, "splits tokens experts"], valid: Bool[Array, "tokens"], *, k: int, divide_by_sum: bool
) -> TokenChoices:
    """Computes softmax top-k routing (`layers.router.route`) from logits given as partial sums (`project.project`).

    Among equal probabilities the expert with the smaller id comes first, as in `lax.top_k`. A token that is not valid chooses
    no expert: all its ids are the number of experts.
    """
    _, tokens, num_experts = splits.shape
    layout = row_layout(num_experts)

    def body(splits_ref, valid_ref, weights_ref, experts_ref, is_chosen_ref):
        expert = plgpu.broadcasted_iota(jnp.int32, (num_experts,), 0, layout=layout)

        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            logits = sum_of_splits(splits_ref, token, pl.ds(0, num_experts))
            p = jnp.exp(logits - jnp.max(logits))
            p = p / jnp.sum(p)
            zero = plgpu.layout_cast(jnp.zeros(num_experts, jnp.float32), layout)
            weights, experts, total = zero, zero, jnp.float32(0)
            for place in range(k):
                largest = jnp.max(p)
                # Expert ids are exact in f32, in which the maximum is computed.
                chosen = -jnp.max(jnp.where(p == largest, -expert.astype(jnp.float32), -jnp.float32(num_experts)))
                weights = jnp.where(expert == place, largest, weights)
                experts = jnp.where(expert == place, chosen, experts)
                total = total + largest
                p = jnp.where(expert.astype(jnp.float32) == chosen, -1.0, p)
            weights_ref[token, pl.ds(0, num_experts)] = weights / total if divide_by_sum else weights
            is_valid = valid_ref[token]
            experts_ref[token, pl.ds(0, num_experts)] = experts.astype(jnp.int32) * is_valid + num_experts * (1 - is_valid)
            is_chosen_ref[token, pl.ds(0, num_experts)] = (p < 0).astype(jnp.int32) * is_valid

    outputs = [jax.ShapeDtypeStruct((tokens, num_experts), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    kernel = launch("route_rows", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return TokenChoices(*kernel(splits, valid.astype(jnp.int32)))
