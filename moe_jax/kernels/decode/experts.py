"""The experts of few tokens, up to the sum over a token's choices, which `add_norm.add_experts` forms."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.decode.add_norm import ExpertRows
from moe_jax.kernels.decode.plan_rows import plan_rows
from moe_jax.kernels.decode.route import Choice
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.routing import Plan, plan


def expert_rows(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "layers experts 2*inter hidden"],
    w_down: Float[Array, "layers experts hidden inter"],
    choice: Choice,
    layer: Int[Array, ""],
    *,
    k: int,
) -> ExpertRows:
    """Computes each chosen expert's output for each token, with the experts of one layer of a stack.

    Bits are those of `kernels.experts_mlp` with backend "mosaic", before the sum.
    """
    chosen = choice.experts[:, :k]
    rows = mosaic.experts_of_few_pairs(x, w_gate_up, w_down, chosen, layer)
    if rows is not None:
        return ExpertRows(rows, choice.weights, choice.experts, None, None)
    num_experts, (tokens, _) = w_down.shape[1], x.shape
    if tokens <= mosaic.ROW_ALIGNMENT:
        planned = _plan_of_few(choice, layer, k)
    else:
        planned = dataclasses.replace(plan(chosen, num_experts, mosaic.ROW_ALIGNMENT), layer=layer)
    sources, source_of_row = mosaic.rows_of_tokens(x, planned, for_gradients=False)
    _, act = mosaic.gated_matmul(sources, w_gate_up, planned, source_of_row=source_of_row, keep_h=False)
    row_of_pair = None if planned.holds_all_tokens else planned.row_of_pair
    return ExpertRows(mosaic.grouped_matmul(act, w_down, planned), choice.weights, choice.experts, planned.offsets, row_of_pair)


def _plan_of_few(choice: Choice, layer: Int[Array, ""], k: int) -> Plan:
    """Returns the plan with the fields that matmuls read; the others are of the right sizes, and empty."""
    offsets, expert_of_block = plan_rows(choice.is_chosen, layer)
    tokens, num_experts = choice.experts.shape
    # One block more than there may be, as in `plan_of_few`.
    no_row = jnp.zeros((min(num_experts, tokens * k) + 1) * mosaic.ROW_ALIGNMENT, jnp.int32)
    return Plan(
        expert_of_row=no_row,
        token_of_row=no_row,
        pair_of_row=no_row,
        row_of_pair=jnp.zeros((tokens, k), jnp.int32),
        offsets=offsets,
        ends=offsets[1:],
        row_alignment=mosaic.ROW_ALIGNMENT,
        holds_all_tokens=True,
        expert_of_block=expert_of_block,
        layer=layer,
    )
