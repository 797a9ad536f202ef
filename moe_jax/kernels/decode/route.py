"""A router's choice for each token: scores of the experts, the k best, and their weights.

Kernel `route_rows`: one warpgroup per block and token, experts distributed over its threads; k rounds of argmax. Columns after
the last expert, up to a multiple of 128, have the logit -inf, which is never among the k best.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, row_layout, sum_of_splits
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch


class TokenChoices(NamedTuple):
    """Each token's chosen experts and weights. Only the first k columns of the first two are valid.

    There is a column for each expert, up to a multiple of 128.
    """

    weights: Float[Array, "tokens columns"]
    experts: Int[Array, "tokens columns"]
    is_chosen: Int[Array, "tokens columns"]
    """1 for each expert that a valid token chose, else 0."""


@partial(jax.jit, static_argnames=("k", "rule"))
def route_rows(
    splits: Float[Array, "splits tokens experts"],
    valid: Bool[Array, "tokens"],
    bias: Float[Array, "experts"] | None = None,
    *,
    k: int,
    rule: Any,
) -> TokenChoices:
    """Computes `layers.router.route_by_groups` from logits given as partial sums (`project.project`).

    Among equal scores the expert with the smaller id comes first, as in `lax.top_k`. A token that is not valid chooses no
    expert: all its ids are the number of columns.

    Args:
      bias: added to the scores, only for the choice.
      rule: a `config.RouterRule` without groups.
    """
    if fill := -splits.shape[2] % WARPGROUP_THREADS:
        splits = jnp.pad(splits, ((0, 0), (0, 0), (0, fill)), constant_values=-jnp.inf)
        # Above -inf, which marks chosen experts.
        bias = bias if bias is None else jnp.pad(bias, (0, fill), constant_values=jnp.finfo(jnp.float32).min)
    _, tokens, num_experts = splits.shape
    layout = row_layout(num_experts)

    def scores(logits):
        if rule.scoring_func == "sigmoid":
            return 1 / (1 + jnp.exp(-logits))
        p = jnp.exp(logits - jnp.max(logits))
        return p / jnp.sum(p)

    def scaled(weights, total):
        if rule.added_to_sum:
            total = total + rule.added_to_sum
        if rule.least_sum:
            total = jnp.maximum(total, rule.least_sum)
        weights = weights / total if rule.norm_topk_prob else weights
        return weights if rule.routed_scaling_factor == 1 else weights * rule.routed_scaling_factor

    def body(splits_ref, valid_ref, bias_ref, weights_ref, experts_ref, is_chosen_ref):
        expert = plgpu.broadcasted_iota(jnp.int32, (num_experts,), 0, layout=layout)

        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            logits = sum_of_splits(splits_ref, token, pl.ds(0, num_experts))
            score = p = scores(logits)
            if bias_ref is not None:
                p = score + load_row(bias_ref.at[pl.ds(0, num_experts)])
            taken = -1.0 if bias_ref is None else -jnp.inf
            zero = plgpu.layout_cast(jnp.zeros(num_experts, jnp.float32), layout)
            weights, experts, total = zero, zero, jnp.float32(0)
            for place in range(k):
                largest = jnp.max(p)
                # Expert ids are exact in f32, in which the maximum is computed.
                chosen = -jnp.max(jnp.where(p == largest, -expert.astype(jnp.float32), -jnp.float32(num_experts)))
                if bias_ref is not None:
                    largest = jnp.sum(jnp.where(expert.astype(jnp.float32) == chosen, score, 0.0))
                weights = jnp.where(expert == place, largest, weights)
                experts = jnp.where(expert == place, chosen, experts)
                total = total + largest
                p = jnp.where(expert.astype(jnp.float32) == chosen, taken, p)
            weights_ref[token, pl.ds(0, num_experts)] = scaled(weights, total)
            is_valid = valid_ref[token]
            experts_ref[token, pl.ds(0, num_experts)] = experts.astype(jnp.int32) * is_valid + num_experts * (1 - is_valid)
            is_taken = p < 0 if bias_ref is None else p == taken
            is_chosen_ref[token, pl.ds(0, num_experts)] = is_taken.astype(jnp.int32) * is_valid

    outputs = [jax.ShapeDtypeStruct((tokens, num_experts), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    kernel = launch("route_rows", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return TokenChoices(*kernel(splits, valid.astype(jnp.int32), bias))
