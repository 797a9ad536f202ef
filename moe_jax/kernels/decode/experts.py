"""The experts of a step's tokens, up to the sum over a token's choices, which `add_norm.add_experts` computes."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from moe_jax.kernels.decode.add_norm import ExpertRows
from moe_jax.kernels.decode.plan_rows import place_rows, plan_rows
from moe_jax.kernels.decode.route import TokenChoices
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.fp8 import mosaic as fp8_mosaic
from moe_jax.kernels.experts.fp8.mosaic.round_groups import round_tokens
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.routing import Plan, plan
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT

MOST_PLANNED_TOKENS = 256
"""Maximum number of tokens that kernels plan: `plan_rows` holds their choices in registers. XLA places the rows of more."""


def expert_rows(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "layers experts 2*inter hidden"],
    w_down: Float[Array, "layers experts hidden inter"],
    choice: TokenChoices,
    layer: Int[Array, ""],
    *,
    k: int,
    parts: int = 1,
) -> ExpertRows:
    """Computes each chosen expert's output per (token, choice), for one layer of stacked weights.

    Bits equal `kernels.experts_mlp` with backend "mosaic", before the sum.

    Args:
      parts: the weights hold the first of this number of equal parts of a layer's experts. `choice.is_chosen` must have no
        others, and the rows of choices of others are arbitrary.
    """
    chosen, num_held = choice.experts[:, :k], w_down.shape[1]
    rows = mosaic.experts_of_few_pairs(x, w_gate_up, w_down, chosen, layer)
    if rows is not None:
        return ExpertRows(rows, choice.weights, choice.experts, None, None)
    many = len(x) > MOST_PLANNED_TOKENS
    source_of_row: Array | None
    place: Array | None
    if many:
        by_xla = dataclasses.replace(plan(chosen, num_held, ROW_ALIGNMENT), layer=layer)
        planned, source_of_row, place = by_xla, by_xla.token_of_row, None
    else:
        planned, source_of_row, place = _planned(choice, layer, k, num_held, parts)
    if planned.holds_all_tokens:
        x, _ = mosaic.rows_of_tokens(x, planned, for_gradients=False)
    _, act = mosaic.gated_matmul(x, w_gate_up, planned, source_of_row=source_of_row, keep_h=False)
    rows = mosaic.grouped_matmul(act, w_down, planned)
    if many:
        return ExpertRows(rows, choice.weights, choice.experts, None, None, planned.row_of_pair)
    return ExpertRows(rows, choice.weights, choice.experts, planned.offsets, place)


def expert_rows_in_fp8(
    x: BFloat16[Array, "tokens hidden"],
    gate_up: QuantisedMatrices,
    down: QuantisedMatrices,
    choice: TokenChoices,
    layer: Int[Array, ""],
    *,
    k: int,
) -> ExpertRows:
    """Computes `expert_rows` with products in FP8, from FP8 stacks of layers, for at most MOST_PLANNED_TOKENS tokens.

    Bits equal `kernels.experts_mlp` with `precision` and backend "mosaic", before the sum.
    """
    # Few pairs need no plan, and no kernel that rounds.
    pairs = fp8_mosaic.experts_of_few_pairs(x, gate_up, down, choice.experts[:, :k], layer)
    if pairs is not None:
        return ExpertRows(pairs, choice.weights, choice.experts, None, None)
    planned, source_of_row, place = _planned(choice, layer, k, down.values.shape[1])
    rows = round_tokens(x)
    if source_of_row is not None:
        rows = _rows_of_sources(rows, source_of_row)
    _, act = fp8_mosaic.gated_matmul(rows, gate_up, planned, keep_h=False)
    outputs = fp8_mosaic.grouped_matmul(act, down, planned)
    return ExpertRows(outputs, choice.weights, choice.experts, planned.offsets, place)


def _rows_of_sources(tokens: QuantisedRows, source_of_row: Int[Array, "rows"]) -> QuantisedRows:
    """Returns the tokens of these rows. A row without one gets an arbitrary token; its results are not read."""
    values, scales = tokens
    # XLA moves four bytes as fast as one.
    words = jax.lax.bitcast_convert_type(values.reshape(len(values), -1, 4), jnp.uint32)
    gathered = jax.lax.bitcast_convert_type(words.at[source_of_row].get(mode="clip"), values.dtype)
    return QuantisedRows(gathered.reshape(len(source_of_row), values.shape[1]), scales.at[:, source_of_row].get(mode="clip"))


def _planned(
    choice: TokenChoices, layer: Int[Array, ""], k: int, num_held: int, parts: int = 1
) -> tuple[Plan, Array | None, Array | None]:
    """Returns a plan by kernels, source_of_row, and `place_rows`; None if token t's row is row t of its expert's block.

    Of the plan, only the fields that matmuls read are set; the others are zeros of the right shape.
    """
    tokens = len(choice.experts)
    holds_all_tokens = tokens <= ROW_ALIGNMENT
    # One extra block, because a tile of two blocks may begin at the last block.
    blocks = min(num_held, tokens * k) + (0 if holds_all_tokens else tokens * k // ROW_ALIGNMENT) + 1
    options = dict(num_held=num_held, num_blocks=blocks, holds_all_tokens=holds_all_tokens)
    found = plan_rows(choice.is_chosen, layer, **options)
    no_row = jnp.zeros(blocks * ROW_ALIGNMENT, jnp.int32)
    planned = Plan(
        expert_of_row=no_row,
        token_of_row=no_row,
        pair_of_row=no_row,
        # Tiles are chosen by the expected rows of an expert: each token has the held experts' share of its choices.
        row_of_pair=jnp.zeros((tokens, -(-k // parts)), jnp.int32),
        offsets=found.offsets,
        ends=no_row[:num_held],
        row_alignment=ROW_ALIGNMENT,
        holds_all_tokens=holds_all_tokens,
        expert_of_block=found.expert_of_block,
        chosen_rows=found.chosen_rows,
        layer=layer,
    )
    if holds_all_tokens:
        return planned, None, None
    place, source_of_row = place_rows(choice.is_chosen, choice.experts, found, k=k, num_blocks=blocks)
    return planned, source_of_row, place
