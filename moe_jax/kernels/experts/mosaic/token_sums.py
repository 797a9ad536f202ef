"""Each token's sum over the rows of its choices: y[t] = sum_k weights[t, k] * rows[row(t, k)].

Cost: reads the rows that experts computed once and writes T*D elements, at the speed of a copy if these are all rows. Rows of
choices not computed on this device (most choices, if it has a part of the experts) are not read. XLA's gather reads some row
for each of them.

Kernel `sum_rows`:

    roles     4 equal warpgroups, each with its own items: loads directly into registers, no TMA, no `Pipeline`
    smem      none
    item      `at_once` tokens x `columns` columns: at most 8 rows of 512 or 1024 columns, predicated loads
    order     from the first choice to the last, one f32 addition each: deterministic
    time      load     |L0 L1|L2 L3|L4      an item's summands are in flight while the previous one is summed,
              sum         |S0 S1|S2 S3      and the row numbers of the item after that
    invariant an item after the last one loads the last one again and stores nothing
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch

WARPGROUPS = 4
"""Warpgroups of a block, each with its own rows in flight; together they use all registers of a core."""

ROWS = 8
"""Upper bound on the rows that a warpgroup loads at once. Two such loads and the row numbers of two more fill its registers."""

VECTOR = 8
"""Upper bound on the elements of 16 bits that a thread loads at once."""


def columns_at_a_time(hidden: int, k: int) -> int | None:
    """Returns how many columns a warpgroup sums at a time; None if the kernel does not support this size."""
    return next((columns for columns in (1024, 512) if hidden % columns == 0 and 0 < k <= ROWS), None)


@partial(jax.jit, static_argnames=("columns", "share", "shares"))
def sum_rows(
    rows: Float[Array, "rows hidden"],
    plan: Plan,
    weights: Float[Array, "tokens k"] | None,
    *,
    columns: int,
    share: int,
    shares: int,
) -> Float[Array, "share hidden"]:
    """Computes y[t] = sum_k weights[t, k] * rows[row(t, k)] in f32, for one of `shares` equal ranges of tokens."""
    (all_tokens, k), hidden = plan.row_of_pair.shape, rows.shape[1]
    tokens = all_tokens // shares
    # Several tokens at a time if each has few choices, so that enough rows are in flight.
    at_once = next(n for n in range(ROWS // k, 0, -1) if tokens % n == 0)
    column_parts = hidden // columns
    items = tokens // at_once * column_parts
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=min(VECTOR, columns // WARPGROUP_THREADS))

    def body(row_of_pair_ref, offsets_ref, weights_ref, rows_ref, y_ref):
        computed_rows = offsets_ref[offsets_ref.shape[0] - 1]
        first_item = lax.axis_index("block") * WARPGROUPS + lax.axis_index("warpgroup")
        item_step = lax.axis_size("block") * WARPGROUPS

        def first_token_and_columns(turn):
            """First token and the columns of this warpgroup's item number `turn`, or of the last item if there are fewer."""
            item = jnp.minimum(first_item + turn * item_step, items - 1)
            column = lax.rem(item, jnp.int32(column_parts)) * columns
            return lax.div(item, jnp.int32(column_parts)) * at_once, pl.ds(column, columns)

        def pairs(turn):
            first, _ = first_token_and_columns(turn)
            return [(share * tokens + first + i, choice) for i in range(at_once) for choice in range(k)]

        def row_numbers(turn):
            return [row_of_pair_ref[pair] for pair in pairs(turn)]

        def load(turn, numbers):
            """(summands, their weights) of an item."""
            _, item_columns = first_token_and_columns(turn)

            def nothing():
                return plgpu.layout_cast(jnp.zeros(columns, rows.dtype), layout)

            def read(row):
                return plgpu.load(rows_ref.at[row, item_columns], layout=layout, optimized=False)

            summands = [lax.cond(row < computed_rows, partial(read, row), nothing) for row in numbers]
            return summands, [1] * len(summands) if weights_ref is None else [weights_ref[pair] for pair in pairs(turn)]

        def store(turn, loaded):
            first, item_columns = first_token_and_columns(turn)
            terms = [a.astype(jnp.float32) * weight for a, weight in zip(*loaded, strict=True)]
            for i in range(at_once):
                y = sum(terms[i * k + 1 : (i + 1) * k], start=terms[i * k])

                @pl.when(first_item + turn * item_step < items)
                def _(i=i, y=y):
                    y_ref[first + i, item_columns] = y.astype(rows.dtype)

        def two_turns(i, on_their_way):
            # An item's summands and weights, and the row numbers of the two items after it.
            turn, (summands, rows_of_next, rows_of_second) = 2 * i, on_their_way
            rows_of_third, rows_of_fourth = row_numbers(turn + 3), row_numbers(turn + 4)
            summands_of_next = load(turn + 1, rows_of_next)
            store(turn, summands)
            summands = load(turn + 2, rows_of_second)
            store(turn + 1, summands_of_next)
            return summands, rows_of_third, rows_of_fourth

        first, second, third = map(row_numbers, map(jnp.int32, range(3)))
        turns = lax.div(items - first_item + item_step - 1, item_step)
        pairs_of_turns = lax.div(turns + 1, jnp.int32(2))
        lax.fori_loop(0, pairs_of_turns, two_turns, (load(jnp.int32(0), first), second, third))

    output = jax.ShapeDtypeStruct((tokens, hidden), rows.dtype)
    kernel = launch("sum_rows", body, [output], [], warpgroups=WARPGROUPS)
    return kernel(plan.row_of_pair, plan.offsets, None if weights is None else weights.astype(jnp.float32), rows)[0]
