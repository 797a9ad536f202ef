"""The plan of few tokens in one kernel: `experts.routing.plan_of_few`, as far as the matmuls and the sum behind them read it.

Kernel `plan_rows`: one warpgroup of one block, experts dealt out to its threads.

    smem      3 E numbers: sums over experts are formed by adding the row to itself, shifted by 1, 2, 4, ...; zeros in front
    rows      expert e's block begins at row 64 * (chosen experts before e)
    blocks    block b belongs to expert number (experts e with at most b chosen experts up to e)
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moe_jax.kernels.hopper.launch import launch
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT


class FewTokensPlan(NamedTuple):
    """Blocks of `ROW_ALIGNMENT` rows, one for each expert that was chosen; token t's row stands at place t of each block."""

    offsets: Int[Array, "experts+1"]
    """As `Plan.offsets`."""
    expert_of_block: Int[Array, "experts"]
    """The place of each block's expert in the stack of all layers; blocks behind the last one have any expert."""


@partial(jax.jit, static_argnames=())
def plan_rows(is_chosen: Int[Array, "tokens experts"], layer: Int[Array, ""]) -> FewTokensPlan:
    """Returns the plan of these choices in this layer of a stack."""
    tokens, num_experts = is_chosen.shape
    layout = plgpu.Layout.WG_STRIDED((num_experts,), vec_size=1)

    def body(is_chosen_ref, layer_ref, offsets_ref, expert_of_block_ref, scratch):
        def load(reference, first):
            return plgpu.load(reference.at[pl.ds(first, num_experts)], layout=layout, optimized=False)

        def plan():
            zero = plgpu.layout_cast(jnp.zeros(num_experts, jnp.int32), layout)
            scratch[pl.ds(0, num_experts)] = zero
            chosen = zero
            for token in range(tokens):
                chosen = jnp.maximum(chosen, load(is_chosen_ref.at[token], 0))
            up_to = chosen
            shift = 1
            while shift < num_experts:
                scratch[pl.ds(num_experts, num_experts)] = up_to
                plgpu.commit_smem()
                up_to = up_to + load(scratch, num_experts - shift)
                plgpu.commit_smem()
                shift *= 2
            rows_up_to = ROW_ALIGNMENT * up_to
            offsets_ref[pl.ds(0, num_experts)] = rows_up_to - ROW_ALIGNMENT * chosen
            offsets_ref[pl.ds(1, num_experts)] = rows_up_to
            scratch[pl.ds(num_experts, num_experts)] = up_to
            plgpu.commit_smem()
            block = plgpu.broadcasted_iota(jnp.int32, (num_experts,), 0, layout=layout)
            number = zero
            for expert in range(num_experts):
                number = number + (scratch[num_experts + expert] <= block).astype(jnp.int32)
            expert_of_block_ref[pl.ds(0, num_experts)] = jnp.minimum(number, num_experts - 1) + layer_ref[0] * num_experts

        pl.when(lax.axis_index("block") == 0)(plan)

    outputs = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_experts + 1, num_experts)]
    scratch = [plgpu.SMEM((2 * num_experts,), jnp.int32)]
    return FewTokensPlan(*launch("plan_rows", body, outputs, scratch, warpgroups=1, blocks_per_core=1)(is_chosen, layer[None]))
