"""Kernels on the rows of tokens in which a row's result depends only on that row: a norm, a gate, a logsumexp.

Sums over a row have a fixed order: each thread adds its own columns, then a tree adds the threads' sums.

Kernels `strict_norm`, `strict_gated_silu`, `strict_parts` and `strict_merge`, each with one warpgroup per block and

    strict_norm         a row
    strict_gated_silu   a block of PART columns of a row
    strict_parts        a part of PART columns of the vocabulary, always at the same columns: its maximum m, and sum exp(x - m)
    strict_merge        a row's parts, each in its own lane
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.consumer import LOWEST
from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, normalized, row_layout
from moe_jax.kernels.experts.activation import SILU
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch

PART = 4096
"""Columns of a part, 32 per thread. The last part of a row may have fewer."""

MOST_PARTS = 128
"""Parts of the longest row: one for each thread of the warpgroup that merges them."""


@partial(jax.jit, static_argnames="eps")
def norm_rows(x: Float[Array, "tokens hidden"], weight: Float[Array, "hidden"], *, eps: float) -> Float[Array, "tokens hidden"]:
    """Computes RMSNorm, weight * x / sqrt(mean(x^2) + eps), as `decode.add_norm` does after its sum."""
    (tokens, hidden), dtype = x.shape, x.dtype
    whole = pl.ds(0, hidden)

    def body(x_ref, weight_ref, normed_ref):
        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            row = load_row(x_ref.at[token, whole]).astype(jnp.float32)
            normed_ref[token, whole] = normalized(row, load_row(weight_ref.at[whole]), eps, dtype)

    outputs = [jax.ShapeDtypeStruct(x.shape, dtype)]
    kernel = launch("strict_norm", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return kernel(x, weight.astype(dtype))[0]


@partial(jax.jit, static_argnames="dtype")
def gated_silu(h: Float[Array, "tokens 2*inter"], *, dtype: Any) -> Float[Array, "tokens inter"]:
    """Computes silu(gate) * up of h = [gate | up] in f32, rounded once. `inter` is a multiple of 128."""
    tokens, inter = h.shape[0], h.shape[1] // 2

    def body(h_ref, act_ref):
        def compute(token, first, columns):
            gate, up = (load_row(h_ref.at[token, pl.ds(half + first, columns)]) for half in (0, inter))
            act_ref[token, pl.ds(first, columns)] = SILU.forward(gate, up, in_kernel=True).astype(dtype)

        _for_parts(tokens, inter, compute)

    outputs = [jax.ShapeDtypeStruct((tokens, inter), dtype)]
    return launch("strict_gated_silu", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)(h)[0]


@jax.jit
def log_sum_exp(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows"]:
    """Computes the logsumexp over the vocabulary of each row, f32.

    Raises:
        ValueError: the vocabulary is not a multiple of 128, or has more than 524288 entries.
    """
    rows, vocab = logits.shape
    if vocab % WARPGROUP_THREADS or not 0 < vocab <= PART * MOST_PARTS:
        raise ValueError(f"the vocabulary must be a multiple of {WARPGROUP_THREADS}, at most {PART * MOST_PARTS}; got {vocab}")
    num_parts, lanes = -(-vocab // PART), row_layout(MOST_PARTS)

    def add_up(logits_ref, maxima_ref, sums_ref):
        def compute(row, first, columns):
            x = load_row(logits_ref.at[row, pl.ds(first, columns)])
            largest = jnp.max(x)
            in_lane = pl.ds(first // PART * MOST_PARTS, MOST_PARTS)
            maxima_ref[row, in_lane] = _all_lanes(largest)
            sums_ref[row, in_lane] = _all_lanes(jnp.sum(jnp.exp(x - largest)))

        _for_parts(rows, vocab, compute)

    def merge(maxima_ref, sums_ref, out_ref):
        @plgpu.nd_loop((rows,), collective_axes="block")
        def _row(info):
            row = info.index[0]
            lane = plgpu.broadcasted_iota(jnp.int32, (MOST_PARTS,), 0, layout=lanes)
            maxima, sums = _all_lanes(LOWEST), _all_lanes(0.0)
            for part in range(num_parts):
                of_part = pl.ds(part * MOST_PARTS, MOST_PARTS)
                maxima = jnp.where(lane == part, load_row(maxima_ref.at[row, of_part]), maxima)
                sums = jnp.where(lane == part, load_row(sums_ref.at[row, of_part]), sums)
            largest = jnp.max(maxima)
            total = _all_lanes(jnp.sum(sums * jnp.exp(maxima - largest)))
            out_ref[row, pl.ds(0, MOST_PARTS)] = jnp.log(total) + largest

    def in_kernel(name, body, columns, count, *inputs):
        outputs = [jax.ShapeDtypeStruct((rows, columns), jnp.float32)] * count
        return launch(name, body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)(*inputs)

    parts = in_kernel("strict_parts", add_up, num_parts * MOST_PARTS, 2, logits)
    return in_kernel("strict_merge", merge, MOST_PARTS, 1, *parts)[0][:, 0]


def _for_parts(rows: int, columns: int, compute: Any) -> None:
    """Calls compute(row, first column, columns) for each part of each row."""
    num_parts = -(-columns // PART)
    last = columns - (num_parts - 1) * PART

    @plgpu.nd_loop((rows, num_parts), collective_axes="block")
    def _part(info):
        row, part = info.index
        if num_parts > 1:
            pl.when(part < num_parts - 1)(lambda: compute(row, part * PART, PART))
        pl.when(part == num_parts - 1)(lambda: compute(row, (num_parts - 1) * PART, last))


def _all_lanes(value: Any) -> Float[Array, "128"]:
    return plgpu.layout_cast(jnp.full(MOST_PARTS, value, jnp.float32), row_layout(MOST_PARTS))
