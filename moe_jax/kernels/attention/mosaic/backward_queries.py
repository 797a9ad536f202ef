"""The gradient of q on Hopper: for each block of queries, over the blocks of keys that it sees.

    p = exp(scale * q k^T - lse)      ds = p * (dout v^T - delta)      dq = scale * ds k

Cost for N visible (query, key) pairs of whole blocks: 2*B*H*N*(2*d + e) FLOPs. Each sum has one order: the same bits each run.
"""

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
    OWN_ROWS,
    Ring,
    Work,
    broadcast_columns,
    in_interval,
    largest_ring,
    launch,
    own_rows,
    own_tokens,
    wgmma_registers,
)
from moe_jax.kernels.hopper.launch import operand_transforms

BLOCK_Q = COMPUTERS * OWN_ROWS
"""Queries of a block."""

CHUNK = 64
"""Columns of dq that pass through shared memory at a time."""


def queries_ring(head_dim: int, value_dim: int) -> Ring:
    """Blocks of keys that registers and shared memory hold."""
    width = head_dim + value_dim
    return largest_ring(128 if max(head_dim, value_dim) <= 128 else 64, width, BLOCK_Q * (width + CHUNK))


@partial(jax.jit, static_argnames=("scale", "ring", "out_dtype"))
def backward_queries(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    dout: Float[Array, "batch seq heads value_dim"],
    lse: Float[Array, "batch heads seq"],
    delta: Float[Array, "batch heads seq"],
    first_key: Int[Array, "batch seq"],
    last_key: Int[Array, "batch seq"] | None,
    previous: Array | None,
    scale: float,
    ring: Ring,
    out_dtype: jnp.dtype,
) -> Float[Array, "batch seq heads head_dim"]:
    """dq in `out_dtype`; lse is in base 2, log2(e) times the natural one. Bounds and sizes as in `mosaic_forward.forward`.

    `previous`, f32, is added: the gradient by way of other keys.
    """
    batch, seq, heads, head_dim = q.shape
    keys, value_dim = k.shape[1], v.shape[3]
    block_kv, stages = ring.block, ring.stages
    work = Work(batch, heads, k.shape[2], seq // BLOCK_Q, "last", keys * (head_dim + value_dim) * q.dtype.itemsize)
    causal, direct = last_key is None, out_dtype != q.dtype

    def body(first_key_ref, *references):
        last_key_ref, *references = references if not causal else (None, *references)
        blocks_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *references = references
        previous_ref, *references = references if previous is not None else (None, *references)
        dq_ref, *scratch = references
        q_smem, dout_smem, k_smem, v_smem, out_smem, staging, q_full, q_empty, k_full, v_full, k_empty, v_empty = scratch
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTERS)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def load(tile, place, before):
                b, block, head, kv_head = place
                last, visited = blocks_ref[b, block, 0], blocks_ref[b, block, 3]
                queries = pl.ds(block * BLOCK_Q, BLOCK_Q)
                pl.when(tile > 0)(lambda: plgpu.barrier_wait(q_empty))
                plgpu.copy_gmem_to_smem(q_ref.at[b, queries, head], q_smem, q_full)
                plgpu.copy_gmem_to_smem(dout_ref.at[b, queries, head], dout_smem, q_full)

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
            first_row = block * BLOCK_Q + warpgroup * OWN_ROWS
            own = pl.ds(first_row, OWN_ROWS)
            first_seen, own_lse, own_delta = (
                plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                for ref in (first_key_ref.at[b, own], lse_ref.at[b, head, own], delta_ref.at[b, head, own])
            )
            last_seen = None
            if not causal:
                last_seen = plgpu.load(last_key_ref.at[b, own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            own_staging = None if staging is None else staging.at[warpgroup]

            def wait_for_k(visit):
                plgpu.barrier_wait(k_full.at[ring.slot(before + visit)])

            def step(dq, visit, is_masked):
                slot = ring.slot(before + visit)
                rows = own_rows(warpgroup)

                if stages == 1:
                    pl.when(visit > 0)(lambda: wait_for_k(visit))
                plgpu.barrier_wait(v_full.at[slot])

                def multiply(s_acc, dp_acc):
                    plgpu.wgmma(s_acc, q_smem.at[rows], k_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dp_acc, dout_smem.at[rows], v_smem.at[slot].transpose((1, 0)))
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    p = jnp.exp2(s * (scale * LOG2_E) - broadcast_columns(own_lse, s.shape))
                    if is_masked:
                        high = own_tokens(first_row) if causal else last_seen
                        seen = in_interval(s.shape, (last - visit) * block_kv, first_seen, high)
                        p = jnp.where(seen, p, 0.0)
                    p = lax.optimization_barrier(p)

                    # Only needed in the next step. Here the branch keeps the assembler from moving the exponentials behind the
                    # wait for the second matmul, beside which they are to run. A ring of one slot holds no next block yet.
                    if stages > 1:
                        pl.when(visit + 1 < visited)(lambda: wait_for_k(visit + 1))
                    dp = dp_acc[...]
                    plgpu.barrier_arrive(v_empty.at[slot])
                    pl.when(visit == visited - 1)(lambda: plgpu.barrier_arrive(q_empty))
                    return p * (dp - broadcast_columns(own_delta, s.shape))

                shape = plgpu.ACC((OWN_ROWS, block_kv), jnp.float32)
                ds = pl.run_scoped(multiply, shape, shape)
                wgmma_registers(dq, ds.astype(q.dtype), k_smem.at[slot], own_staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_empty.at[slot])

            def accumulate(dq):
                pl.loop(0, masked)(lambda visit: step(dq, visit, True))
                pl.loop(masked, unmasked)(lambda visit: step(dq, visit, False))
                pl.loop(unmasked, visited)(lambda visit: step(dq, visit, True))
                return dq[...]

            plgpu.barrier_wait(q_full)
            wait_for_k(0)
            dq = pl.run_scoped(accumulate, plgpu.ACC((OWN_ROWS, head_dim), jnp.float32)) * scale
            for c in range(0, head_dim, CHUNK):
                columns, part = pl.ds(c, CHUNK), dq[:, c : c + CHUNK]
                if previous is not None:
                    part += plgpu.load(previous_ref.at[b, own, head, columns], layout=plgpu.Layout.WGMMA, optimized=False)
                if direct:
                    dq_ref[b, own, head, columns] = part.astype(out_dtype)
                    continue
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[warpgroup] = part.astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], dq_ref.at[b, own, head, columns])
            return before + visited

        @pl.when(warpgroup < COMPUTERS)
        def _compute():
            plgpu.set_max_registers(COMPUTER_REGISTERS, action="increase")
            work.for_each_tile(compute_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzled = operand_transforms(q.dtype)
    scratch = [
        plgpu.SMEM((BLOCK_Q, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((BLOCK_Q, value_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_kv, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_kv, value_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((COMPUTERS, OWN_ROWS, CHUNK), q.dtype, transforms=swizzled),
        (OWN_ROWS, block_kv),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=COMPUTERS),
        *(plgpu.Barrier(num_barriers=stages) for _ in range(2)),
        *(plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages) for _ in range(2)),
    ]
    outputs = [jax.ShapeDtypeStruct(q.shape, out_dtype)]
    run = launch("flash_attention_backward_queries", body, outputs, scratch, q.dtype)
    blocks = key_blocks(first_key, last_key, keys, BLOCK_Q, block_kv)
    bounds = (first_key,) if causal else (first_key, last_key)
    return run(*bounds, blocks, q, k, v, dout, lse, delta, *(() if previous is None else (previous,)))[0]
