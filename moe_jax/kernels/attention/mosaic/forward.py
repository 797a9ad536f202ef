"""The forward pass on Hopper: one loading warpgroup, two that compute 64 queries each (FlashAttention-3, arXiv 2407.08608).

The two take turns at the tensor cores, so that one's softmax runs beside the other's matmuls; within a warpgroup the softmax
of one block of keys runs beside the multiplication of the one before with v.

Cost for q [B,S,H,d], v [B,S,KV,e] and N visible (query, key) pairs of whole blocks: 2*B*H*N*(d + e) FLOPs; q and the result
cross memory once, k and v once per 128 queries, from L2 where it holds them.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.masks import key_blocks
from moe_jax.kernels.attention.mosaic.warpgroups import (
    COMPUTER_REGISTERS,
    COMPUTERS,
    LOADER_REGISTERS,
    LOG2_E,
    NEVER,
    OWN_ROWS,
    Ring,
    Work,
    broadcast_columns,
    in_interval,
    largest_ring,
    launch,
    own_rows,
    own_tokens,
    scores,
    scores_and_weighted_sum,
    weighted_sum,
)
from moe_jax.kernels.hopper.launch import operand_transforms

BLOCK_Q = COMPUTERS * OWN_ROWS
"""Queries of a block."""


def forward_ring(head_dim: int, value_dim: int) -> Ring:
    """Blocks of keys that registers and shared memory hold."""
    resident = BLOCK_Q * (head_dim + _out_chunk(head_dim, value_dim))
    return largest_ring(128 if head_dim <= 192 and value_dim <= 128 else 64, head_dim + value_dim, resident)


def _out_chunk(head_dim: int, value_dim: int) -> int:
    """Columns of the result that leave through shared memory at a time: few where q and v leave little room."""
    return value_dim if max(head_dim, value_dim) <= 128 else 64


@partial(jax.jit, static_argnames=("scale", "ring", "out_dtype"))
def forward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    first_key: Int[Array, "batch seq"],
    last_key: Int[Array, "batch seq"] | None,
    previous: tuple[Array, Array] | None,
    scale: float,
    ring: Ring,
    out_dtype: jnp.dtype,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads seq"]]:
    """out in `out_dtype` and lse = log sum_j exp(scale * q k_j) in f32, over the keys j that query i sees.

    Those are first_key[i] .. last_key[i], last_key[i] = i if None; a query that sees none has out 0 and lse -inf. With
    `previous`, (out, lse) of the same queries over other keys in f32, the result is over both. The number of queries is a
    multiple of BLOCK_Q, that of keys of ring.block.
    """
    batch, seq, heads, head_dim = q.shape
    keys, value_dim = k.shape[1], v.shape[3]
    block_kv, stages = ring.block, ring.stages
    work = Work(batch, heads, k.shape[2], seq // BLOCK_Q, "last", keys * (head_dim + value_dim) * q.dtype.itemsize)
    causal, direct = last_key is None, out_dtype != q.dtype
    score_scale = scale * LOG2_E
    chunk = _out_chunk(head_dim, value_dim)

    def body(first_key_ref, *references):
        last_key_ref, *references = references if not causal else (None, *references)
        blocks_ref, q_ref, k_ref, v_ref, *references = references
        previous_out_ref, previous_lse_ref, *references = references if previous is not None else (None, None, *references)
        out_ref, lse_ref, *scratch = references
        q_smem, k_smem, v_smem, out_smem, staging, q_full, q_empty, k_full, v_full, k_empty, v_empty, turn = scratch
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTERS)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def load(tile, place, before):
                b, block, head, kv_head = place
                last, visited = blocks_ref[b, block, 0], blocks_ref[b, block, 3]
                pl.when(tile > 0)(lambda: plgpu.barrier_wait(q_empty))
                plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(block * BLOCK_Q, BLOCK_Q), head], q_smem, q_full)

                @pl.loop(0, visited)
                def _visits(visit):
                    slot = ring.slot(before + visit)
                    keys = pl.ds((last - visit) * block_kv, block_kv)
                    ring.wait_until_free(k_empty, before + visit)
                    plgpu.copy_gmem_to_smem(k_ref.at[b, keys, kv_head], k_smem.at[slot], k_full.at[slot])
                    ring.wait_until_free(v_empty, before + visit)
                    plgpu.copy_gmem_to_smem(v_ref.at[b, keys, kv_head], v_smem.at[slot], v_full.at[slot])

                return before + visited

            visited, tiles = work.for_each_tile(load, jnp.int32(0))
            pl.when(tiles > 0)(lambda: plgpu.barrier_wait(q_empty))
            ring.drain(k_empty, visited)
            ring.drain(v_empty, visited)

        def compute_tile(_, place, before):
            b, block, head, _ = place
            last, masked, unmasked, visited = (blocks_ref[b, block, i] for i in range(4))
            own_staging = None if staging is None else staging.at[warpgroup]
            first_row = block * BLOCK_Q + warpgroup * OWN_ROWS
            own = pl.ds(first_row, OWN_ROWS)
            rows = plgpu.Layout.WGMMA.reduce(1)
            first_seen = plgpu.load(first_key_ref.at[b, own], layout=rows, optimized=False)
            last_seen = None if causal else plgpu.load(last_key_ref.at[b, own], layout=rows, optimized=False)

            def softmax(s, visit, maximum, is_masked):
                """(maximum, exp2 of s less the maximum, the factor for what came before); the maximum carries log2(e)*scale."""
                if is_masked:
                    seen = in_interval(
                        s.shape, (last - visit) * block_kv, first_seen, own_tokens(first_row) if causal else last_seen
                    )
                    s = jnp.where(seen, s, -jnp.inf)
                above = jnp.maximum(maximum, s.max(axis=1) * score_scale)
                p = jnp.exp2(s * score_scale - broadcast_columns(above, s.shape))
                return above, p, jnp.exp2(maximum - above)

            def step(visit, carry, is_masked):
                out, maximum, total, weights = carry
                slot, last_slot = ring.slot(before + visit), ring.slot(before + visit - 1)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(turn.at[warpgroup])

                def issued():
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])

                def between(s):
                    plgpu.barrier_arrive(k_empty.at[slot])
                    pl.when(visit == visited - 1)(lambda: plgpu.barrier_arrive(q_empty))
                    above, p, shrink = softmax(s, visit, maximum, is_masked)
                    result = lax.optimization_barrier((above, total * shrink + p.sum(axis=1), p, shrink))
                    # Only needed a step later. Here the branch of the wait keeps the assembler from moving the exponentials
                    # behind the wait for the second matmul, beside which they are to run.
                    plgpu.barrier_wait(v_full.at[slot])
                    return result

                own_q = q_smem.at[own_rows(warpgroup)]
                (above, total, p, shrink), out = scores_and_weighted_sum(
                    own_q, k_smem.at[slot], out, weights, v_smem.at[last_slot], issued, between, own_staging
                )
                plgpu.barrier_arrive(v_empty.at[last_slot])
                # Rounded no earlier: the second matmul reads the old weights' registers, where the new ones go, until its end.
                weights = lax.optimization_barrier(p).astype(q.dtype)
                return out * broadcast_columns(shrink, out.shape), above, total, weights

            slot = ring.slot(before)
            plgpu.barrier_wait(q_full)
            plgpu.barrier_wait(k_full.at[slot])
            s = scores(q_smem.at[own_rows(warpgroup)], k_smem.at[slot])
            plgpu.barrier_arrive(k_empty.at[slot])
            pl.when(visited == 1)(lambda: plgpu.barrier_arrive(q_empty))
            # A finite maximum: a query may see no key of the first blocks, and -inf - -inf is no number.
            none = plgpu.layout_cast(jnp.full(OWN_ROWS, NEVER, jnp.float32), rows)
            maximum, p, _ = softmax(s, 0, none, True)
            plgpu.barrier_wait(v_full.at[slot])
            out = plgpu.layout_cast(jnp.zeros((OWN_ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA)
            carry = out, maximum, p.sum(axis=1), p.astype(q.dtype)
            if not causal or block_kv < BLOCK_Q:
                carry = lax.fori_loop(1, masked, lambda i, c: step(i, c, True), carry)
            carry = lax.fori_loop(masked, unmasked, lambda i, c: step(i, c, False), carry)
            out, maximum, total, weights = lax.fori_loop(unmasked, visited, lambda i, c: step(i, c, True), carry)

            slot = ring.slot(before + visited - 1)
            out = weighted_sum(out, weights, v_smem.at[slot], own_staging)
            plgpu.barrier_arrive(v_empty.at[slot])
            lse = maximum + jnp.log2(total)
            share = 1 / total if causal else jnp.where(total > 0, 1 / total, 0.0)
            if previous is not None:
                # Finite, so that differences are numbers where neither saw a key.
                old_lse = plgpu.load(previous_lse_ref.at[b, head, own], layout=rows, optimized=False) * LOG2_E
                above = jnp.maximum(jnp.maximum(lse, old_lse), NEVER)
                weight, old_weight = jnp.exp2(lse - above), jnp.exp2(old_lse - above)
                both = weight + old_weight
                lse = above + jnp.log2(both)
                whole = jnp.where(both > 0, 1 / both, 0.0)
                share, old_share = share * weight * whole, old_weight * whole
            out *= broadcast_columns(share, out.shape)
            for c in range(0, value_dim, chunk):
                columns, part = pl.ds(c, chunk), out[:, c : c + chunk]
                if previous is not None:
                    of_old = previous_out_ref.at[b, own, head, columns]
                    old = plgpu.load(of_old, layout=plgpu.Layout.WGMMA, optimized=False)
                    part = part + old * broadcast_columns(old_share, old.shape)
                if direct:
                    out_ref[b, own, head, columns] = part.astype(out_dtype)
                    continue
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[warpgroup] = part.astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[b, own, head, columns])
            lse_ref[b, head, own] = lse * math.log(2)
            return before + visited

        @pl.when(warpgroup < COMPUTERS)
        def _compute():
            plgpu.set_max_registers(COMPUTER_REGISTERS, action="increase")
            # Turns go on across tiles: the first is warpgroup 0's, and so would be the one after the last.
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            work.for_each_tile(compute_tile, jnp.int32(0))
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            plgpu.wait_smem_to_gmem(0)

    swizzled = operand_transforms(q.dtype)
    scratch = [
        plgpu.SMEM((BLOCK_Q, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_kv, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_kv, value_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((COMPUTERS, OWN_ROWS, chunk), q.dtype, transforms=swizzled),
        (OWN_ROWS, block_kv),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=COMPUTERS),
        *(plgpu.Barrier(num_barriers=stages) for _ in range(2)),
        *(plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages) for _ in range(2)),
        plgpu.Barrier(num_barriers=COMPUTERS),
    ]
    outputs = [
        jax.ShapeDtypeStruct((*q.shape[:3], value_dim), out_dtype),
        jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
    ]
    run = launch("flash_attention_forward", body, outputs, scratch, q.dtype)
    blocks = key_blocks(first_key, last_key, keys, BLOCK_Q, block_kv)
    bounds = (first_key,) if causal else (first_key, last_key)
    return run(*bounds, blocks, q, k, v, *(previous or ()))
