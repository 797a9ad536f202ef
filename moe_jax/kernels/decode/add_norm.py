"""A layer's residual sum and the norm after it, in one kernel: x' = x + y, then w * x' / sqrt(mean(x'^2) + eps).

y is given as a matmul's partial sums (`add_splits`), or as the rows of a token's experts (`add_experts`).

Kernels `add_splits_norm` and `add_experts_norm`:

    roles     one warpgroup per block, all equal: a row is in registers, and shared memory is used only for the sum over a row
    rounding  y, x' and the normalized row are rounded to x's dtype, as between the layers' modules
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, normalized, row_layout, sum_of_splits
from moe_jax.kernels.hopper.launch import launch


class AddedNorm(NamedTuple):
    """The residual stream x' after an addition, and its RMSNorm."""

    x: Float[Array, "tokens hidden"]
    normed: Float[Array, "tokens hidden"]


class ExpertRows(NamedTuple):
    """Expert outputs per (token, choice), before their weighted sum. Columns 0 .. k - 1 of a token's row are its choices."""

    rows: Float[Array, "rows hidden"]
    weights: Float[Array, "tokens _"]
    experts: Int[Array, "tokens _"]
    offsets: Int[Array, "experts+1"] | None
    """`Plan.offsets`; None: a token's rows are consecutive, in the order of its choices."""
    place: Int[Array, "tokens experts"] | None
    """The token's row among the rows of each expert; None: token t's row is row t."""
    row_of_pair: Int[Array, "tokens k"] | None = None
    """The row of each choice, as `Plan.row_of_pair`; `offsets` and `place` are then None."""


@partial(jax.jit, static_argnames="eps")
def add_splits(
    x: Float[Array, "tokens hidden"],
    splits: Float[Array, "splits tokens hidden"],
    weight: Float[Array, "hidden"],
    *,
    eps: float,
) -> AddedNorm:
    """Returns x' = x + sum of the partial sums, and the RMSNorm of x'."""
    hidden = x.shape[1]

    def addend(inputs, token):
        return sum_of_splits(inputs[0], token, pl.ds(0, hidden))

    return _add_norm("add_splits_norm", x, (splits,), weight, eps, addend)


class SharedRows(NamedTuple):
    """The output of the experts that all tokens share, times sigmoid(normed . gate) if they have a gate."""

    splits: Float[Array, "splits tokens hidden"]
    """A matmul's partial sums."""
    normed: Float[Array, "tokens hidden"] | None = None
    gate: Float[Array, "hidden"] | None = None


@partial(jax.jit, static_argnames=("eps", "k"))
def add_experts(
    x: Float[Array, "tokens hidden"],
    outputs: ExpertRows,
    weight: Float[Array, "hidden"],
    shared: SharedRows | None = None,
    *,
    eps: float,
    k: int,
) -> AddedNorm:
    """Returns x' = x + each token's weighted sum of expert outputs (f32, first choice first), and the RMSNorm of x'.

    The output of shared experts is the sum's last term. A token has k experts or none. If it has none, the first of its ids is
    the number of columns of ids, and only shared experts add to it.
    """
    hidden, num_columns = x.shape[1], outputs.weights.shape[1]

    def of_shared(shared: SharedRows, token):
        total = sum_of_splits(shared.splits, token, pl.ds(0, hidden)).astype(jnp.float32)
        if shared.gate is None or shared.normed is None:
            return total
        normed, gate = (load_row(row).astype(jnp.float32) for row in (shared.normed.at[token, pl.ds(0, hidden)], shared.gate))
        return total / (1 + jnp.exp(-jnp.sum(normed * gate)))

    def addend(all_inputs: tuple[ExpertRows, SharedRows | None], token):
        inputs, shared = all_inputs

        def row_of(i):
            if inputs.row_of_pair is not None:
                return inputs.row_of_pair[token, i]
            if inputs.offsets is None:
                return token * k + i
            expert = inputs.experts[token, i]
            return inputs.offsets[expert] + (token if inputs.place is None else inputs.place[token, expert])

        def of_choices():
            # All loads at once: else each would wait for the previous one.
            places = [row_of(i) for i in range(k)]
            rows = [load_row(inputs.rows.at[place, pl.ds(0, hidden)]) for place in places]
            terms = [row.astype(jnp.float32) * inputs.weights[token, i] for i, row in enumerate(rows)]
            return sum(terms[1:], start=terms[0])

        # A token without experts has no rows.
        nothing = plgpu.layout_cast(jnp.zeros(hidden, jnp.float32), row_layout(hidden))
        routed = lax.cond(inputs.experts[token, 0] < num_columns, of_choices, lambda: nothing)
        return routed if shared is None else routed + of_shared(shared, token)

    return _add_norm("add_experts_norm", x, (outputs, shared), weight, eps, addend)


def _add_norm(name: str, x: Array, inputs: Any, weight: Array, eps: float, addend: Any) -> AddedNorm:
    (tokens, hidden), dtype = x.shape, x.dtype
    whole = pl.ds(0, hidden)

    def body(x_ref, inputs, weight_ref, sum_ref, normed_ref):
        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            x = load_row(x_ref.at[token, whole]).astype(jnp.float32)
            y = addend(inputs, token).astype(dtype)
            total = (x + y.astype(jnp.float32)).astype(dtype)
            sum_ref[token, whole] = total
            normed_ref[token, whole] = normalized(total.astype(jnp.float32), load_row(weight_ref.at[whole]), eps, dtype)

    outputs = [jax.ShapeDtypeStruct(x.shape, dtype)] * 2
    kernel = launch(name, body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return AddedNorm(*kernel(x, inputs, weight.astype(dtype)))
