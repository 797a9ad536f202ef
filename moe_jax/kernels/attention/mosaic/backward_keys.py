"""The gradients of k and v on Hopper: for each block of keys, over the blocks of queries that see it, of every head it serves.

    p = exp(scale * q k^T - lse)      ds = p * (dout v^T - delta)      dk = scale * ds^T q      dv = p^T dout

Scores are computed transposed, [keys, queries], so that p^T and ds^T are operands in registers.

Cost for N visible (query, key) pairs of whole blocks: 4*B*H*N*(d + e) FLOPs, and B*H*N*2*d more where dk and dv do not fit
the registers at once and are computed one after the other. Each sum has one order: the same bits each run.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.masks import query_blocks
from moe_jax.kernels.attention.mosaic.warpgroups import (
    COMPUTER_REGISTERS,
    COMPUTERS,
    LOADER_REGISTERS,
    LOG2_E,
    OWN_ROWS,
    Ring,
    Work,
    broadcast_rows,
    in_interval,
    largest_ring,
    launch,
    own_rows,
    own_tokens,
    wgmma_registers,
)
from moe_jax.kernels.hopper.launch import operand_transforms

BLOCK_KV = COMPUTERS * OWN_ROWS
"""Keys of a block."""


def keys_ring(head_dim: int, value_dim: int) -> Ring:
    """Blocks of queries that registers and shared memory hold."""
    return largest_ring(64, head_dim + value_dim, BLOCK_KV * (head_dim + value_dim))


@partial(jax.jit, static_argnames=("scale", "ring", "out_dtype"))
def backward_keys(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    dout: Float[Array, "batch seq heads value_dim"],
    lse: Float[Array, "batch heads seq"],
    delta: Float[Array, "batch heads seq"],
    first_query: Int[Array, "batch keys"] | None,
    last_query: Int[Array, "batch keys"],
    previous: tuple[Array, Array] | None,
    scale: float,
    ring: Ring,
    out_dtype: jnp.dtype,
) -> tuple[Float[Array, "batch keys kv_heads head_dim"], Float[Array, "batch keys kv_heads value_dim"]]:
    """dk and dv in `out_dtype`; lse is in base 2, log2(e) times the natural one.

    Key j is seen by the queries first_query[j] .. last_query[j], first_query[j] = j if None. `previous`, (dk, dv) in f32 by way
    of other queries, is added. The number of keys is a multiple of BLOCK_KV, that of queries of ring.block.
    """
    arguments = q, k, v, dout, lse, delta, first_query, last_query
    sizes = scale, ring, out_dtype
    if k.shape[3] + v.shape[3] <= 256:
        dk, dv = _launch(*arguments, previous or (), *sizes, of_k=True, of_v=True)
        return dk, dv
    of_dk, of_dv = (previous[:1], previous[1:]) if previous is not None else ((), ())
    (dk,), (dv,) = (
        _launch(*arguments, of_dk, *sizes, of_k=True, of_v=False),
        _launch(*arguments, of_dv, *sizes, of_k=False, of_v=True),
    )
    return dk, dv


def _launch(
    q, k, v, dout, lse, delta, first_query, last_query, previous, scale: float, ring: Ring, out_dtype, *, of_k: bool, of_v: bool
) -> list[Array]:
    batch, seq, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    group = heads // kv_heads
    block_q, stages = ring.block, ring.stages
    # Too few tiles a head for sections: a thread block would get up to 1.9 times the mean.
    work = Work(batch, kv_heads, kv_heads, keys // BLOCK_KV, "first", None)
    causal, direct = first_query is None, out_dtype != q.dtype

    def body(last_query_ref, *references):
        first_query_ref, *references = references if not causal else (None, *references)
        blocks_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *references = references
        added, references = references[: len(previous)], references[len(previous) :]
        outputs, scratch = references[: of_k + of_v], references[of_k + of_v :]
        (
            k_smem,
            v_smem,
            q_smem,
            dout_smem,
            lse_smem,
            delta_smem,
            staging,
            kv_full,
            kv_empty,
            full,
            delta_full,
            empty,
        ) = scratch
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTERS)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def load(tile, place, before):
                b, block, kv_head, _ = place
                first, visited = blocks_ref[b, block, 0], blocks_ref[b, block, 3]
                keys = pl.ds(block * BLOCK_KV, BLOCK_KV)
                pl.when(tile > 0)(lambda: plgpu.barrier_wait(kv_empty))
                plgpu.copy_gmem_to_smem(k_ref.at[b, keys, kv_head], k_smem, kv_full)
                plgpu.copy_gmem_to_smem(v_ref.at[b, keys, kv_head], v_smem, kv_full)

                @pl.loop(0, group * visited)
                def _visits(visit):
                    slot = ring.slot(before + visit)
                    head = kv_head * group + lax.div(visit, visited)
                    queries = pl.ds((first + lax.rem(visit, visited)) * block_q, block_q)
                    ring.wait_until_free(empty, before + visit)
                    plgpu.copy_gmem_to_smem(q_ref.at[b, queries, head], q_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(lse_ref.at[b, head, queries], lse_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(dout_ref.at[b, queries, head], dout_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(delta_ref.at[b, head, queries], delta_smem.at[slot], delta_full.at[slot])

                return before + group * visited

            visited, tiles = work.for_each_tile(load, jnp.int32(0))
            pl.when(tiles > 0)(lambda: plgpu.barrier_wait(kv_empty))
            ring.drain(empty, visited)

        def compute_tile(_, place, before):
            b, block, kv_head, _ = place
            first, masked, unmasked, visited = (blocks_ref[b, block, i] for i in range(4))
            first_row = block * BLOCK_KV + warpgroup * OWN_ROWS
            own = pl.ds(first_row, OWN_ROWS)
            last_seeing = plgpu.load(last_query_ref.at[b, own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            first_seeing = None
            if not causal:
                first_seeing = plgpu.load(first_query_ref.at[b, own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            own_staging = None if staging is None else staging.at[warpgroup]
            columns = plgpu.Layout.WGMMA.reduce(0)

            def step(dk, dv, head, visit, is_masked):
                slot = ring.slot(before + head * visited + visit)
                rows = own_rows(warpgroup)
                plgpu.barrier_wait(full.at[slot])

                def multiply(s_acc, dp_acc=None):
                    plgpu.wgmma(s_acc, k_smem.at[rows], q_smem.at[slot].transpose((1, 0)))
                    if of_k:
                        plgpu.wgmma(dp_acc, v_smem.at[rows], dout_smem.at[slot].transpose((1, 0)))
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1 if of_k else 0)
                    block_lse = plgpu.load(lse_smem.at[slot], layout=columns)
                    p = jnp.exp2(s * (scale * LOG2_E) - broadcast_rows(block_lse, s.shape))
                    if is_masked:
                        low = own_tokens(first_row) if causal else first_seeing
                        seen = in_interval(s.shape, (first + visit) * block_q, low, last_seeing)
                        p = jnp.where(seen, p, 0.0)
                    if not of_k:
                        plgpu.barrier_wait(delta_full.at[slot])
                        return p, p
                    p = lax.optimization_barrier(p)
                    # A wait of its own: its branch keeps the assembler from moving the exponentials behind the wait for the
                    # second matmul, beside which they are to run.
                    plgpu.barrier_wait(delta_full.at[slot])
                    dp = dp_acc[...]
                    block_delta = plgpu.load(delta_smem.at[slot], layout=columns)
                    return p, p * (dp - broadcast_rows(block_delta, s.shape))

                accumulators = [plgpu.ACC((OWN_ROWS, block_q), jnp.float32)] * (1 + of_k)
                p, ds = (x.astype(q.dtype) for x in pl.run_scoped(multiply, *accumulators))
                if of_v:
                    wgmma_registers(dv, p, dout_smem.at[slot], own_staging)
                if of_k:
                    wgmma_registers(dk, ds, q_smem.at[slot], own_staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot])

            def accumulate(*accumulators):
                dk, dv = accumulators[0] if of_k else None, accumulators[-1] if of_v else None

                @pl.loop(0, group)
                def _heads(head):
                    pl.loop(0, masked)(lambda visit: step(dk, dv, head, visit, True))
                    pl.loop(masked, unmasked)(lambda visit: step(dk, dv, head, visit, False))
                    pl.loop(unmasked, visited)(lambda visit: step(dk, dv, head, visit, True))

                return [accumulator[...] for accumulator in accumulators]

            plgpu.barrier_wait(kv_full)
            wanted = [(head_dim, k_smem, scale)] * of_k + [(value_dim, v_smem, 1.0)] * of_v
            sums = pl.run_scoped(accumulate, *(plgpu.ACC((OWN_ROWS, width), jnp.float32) for width, _, _ in wanted))
            # 16-bit results leave through the place of k and v, whose rows only this warpgroup has read.
            for i, (total, (_, buffer, factor), target) in enumerate(zip(sums, wanted, outputs, strict=True)):
                total *= factor
                if previous:
                    total += plgpu.load(added[i].at[b, own, kv_head], layout=plgpu.Layout.WGMMA, optimized=False)
                if direct:
                    target[b, own, kv_head] = total.astype(out_dtype)
                    continue
                own_buffer = buffer.at[own_rows(warpgroup)]
                own_buffer[...] = total.astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(own_buffer, target.at[b, own, kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_empty)
            return before + group * visited

        @pl.when(warpgroup < COMPUTERS)
        def _compute():
            plgpu.set_max_registers(COMPUTER_REGISTERS, action="increase")
            work.for_each_tile(compute_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzled = operand_transforms(q.dtype)
    scratch = [
        plgpu.SMEM((BLOCK_KV, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((BLOCK_KV, value_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_q, head_dim), q.dtype, transforms=swizzled),
        plgpu.SMEM((stages, block_q, value_dim), q.dtype, transforms=swizzled),
        *(plgpu.SMEM((stages, block_q), jnp.float32) for _ in range(2)),
        (OWN_ROWS, block_q),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=COMPUTERS),
        *(plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (3, 1)),
        plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages),
    ]
    shapes = [jax.ShapeDtypeStruct(k.shape, out_dtype)] * of_k + [jax.ShapeDtypeStruct(v.shape, out_dtype)] * of_v
    run = launch("flash_attention_backward_keys", body, shapes, scratch, q.dtype)
    blocks = query_blocks(first_query, last_query, seq, block_q, BLOCK_KV)
    bounds = (last_query,) if causal else (last_query, first_query)
    return run(*bounds, blocks, q, k, v, dout, lse, delta, *previous)
