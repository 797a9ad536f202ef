"""Each token's sum over the rows of its choices: y[t] = sum_k weights[t, k] * rows[row(t, k)].

Cost: the rows that experts computed read once and T*D elements written, at the speed of a copy where that is all rows. Rows of
choices that nobody here computes, of a device's part of the experts most, are not read: XLA's gather reads some row for each.
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
"""Of a block, each with rows of its own on their way; together they hold all registers of a core."""

ROWS = 8
"""Rows of which a warpgroup loads `columns_at_a_time`; of two such loads and their numbers more would not fit its registers."""

VECTOR = 8
"""Elements of 16 bits that a thread loads at once, at most."""


def columns_at_a_time(hidden: int, k: int) -> int | None:
    """Columns of one sum that a warpgroup forms at a time; None where this kernel cannot."""
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
    """The sums of the `share`-th of `shares` equal parts of the tokens, formed in f32 from the first choice to the last,
    `columns_at_a_time`."""
    (all_tokens, k), hidden = plan.row_of_pair.shape, rows.shape[1]
    tokens = all_tokens // shares
    # With few choices several tokens at a time, so that as much is on its way.
    at_once = next(n for n in range(ROWS // k, 0, -1) if tokens % n == 0)
    columns_parts = hidden // columns
    items = tokens // at_once * columns_parts
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=min(VECTOR, columns // WARPGROUP_THREADS))

    def body(row_ref, offsets_ref, *references):
        *weight_ref, rows_ref, y_ref = references
        computed_rows = offsets_ref[offsets_ref.shape[0] - 1]
        own = lax.axis_index("block") * WARPGROUPS + lax.axis_index("warpgroup")
        step = lax.axis_size("block") * WARPGROUPS

        def place(turn):
            """First token and columns of this warpgroup's item in that turn; behind the last one that again."""
            item = jnp.minimum(own + turn * step, items - 1)
            column = lax.rem(item, jnp.int32(columns_parts)) * columns
            return lax.div(item, jnp.int32(columns_parts)) * at_once, pl.ds(column, columns)

        def pairs(turn):
            first, _ = place(turn)
            return [(share * tokens + first + i, choice) for i in range(at_once) for choice in range(k)]

        def rows_of(turn):
            return [row_ref[pair] for pair in pairs(turn)]

        def load(turn, own_rows):
            """What is to be summed, and its weights."""
            _, own_columns = place(turn)

            def nothing():
                return plgpu.layout_cast(jnp.zeros(columns, rows.dtype), layout)

            def read(row):
                return plgpu.load(rows_ref.at[row, own_columns], layout=layout, optimized=False)

            summands = [lax.cond(row < computed_rows, partial(read, row), nothing) for row in own_rows]
            return summands, [weight_ref[0][pair] for pair in pairs(turn)] if weight_ref else [1] * len(summands)

        def store(turn, loaded):
            first, own_columns = place(turn)
            terms = [a.astype(jnp.float32) * weight for a, weight in zip(*loaded, strict=True)]
            for i in range(at_once):
                y = sum(terms[i * k + 1 : (i + 1) * k], start=terms[i * k])

                @pl.when(own + turn * step < items)
                def _(i=i, y=y):
                    y_ref[first + i, own_columns] = y.astype(rows.dtype)

        def two_turns(i, state):
            # One item's summands are on their way while another is summed, and the numbers of the rows that come then.
            turn = 2 * i
            loaded, rows_of_next, rows_of_second = state
            rows_of_third, rows_of_fourth = rows_of(turn + 3), rows_of(turn + 4)
            loaded_next = load(turn + 1, rows_of_next)
            store(turn, loaded)
            loaded = load(turn + 2, rows_of_second)
            store(turn + 1, loaded_next)
            return loaded, rows_of_third, rows_of_fourth

        first, second, third = map(rows_of, map(jnp.int32, range(3)))
        turns = lax.div(items - own + step - 1, step)
        lax.fori_loop(0, lax.div(turns + 1, jnp.int32(2)), two_turns, (load(jnp.int32(0), first), second, third))

    inputs = [plan.row_of_pair, plan.offsets, *([] if weights is None else [weights.astype(jnp.float32)]), rows]
    output = jax.ShapeDtypeStruct((tokens, hidden), rows.dtype)
    return launch("sum_rows", body, [output], [], warpgroups=WARPGROUPS)(*inputs)[0]
