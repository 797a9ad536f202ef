"""What a gather of tokens' rows inside the grouped matmuls would save, on a Hopper GPU.

    python benchmarks/gather_in_matmul.py                         # Qwen3-30B-A3B's layer
    python benchmarks/gather_in_matmul.py --tokens 8192 --experts 256 --hidden 7168 --intermediate 2048 --launches 5

Rows are tokens in expert order, each as often as it chose experts. *rows*: y[r] = x[token of r] @ w[e(r)].T with w as wide as
gate_up, and as the activation (dy by w_down). *outer*: dw[e] = sum over the rows r of e of outer(dh[r], x[token of r]) with dh
as wide. *before*: the kernels as they are, `gather_rows` and then the matmul, which TMA feeds. *matmul*: the second of the two
alone. *inside*: the loading warpgroup copies rows from where their tokens lie, 16 bytes a thread and instruction (cp.async),
and nothing of size rows x hidden is written. Results must agree bit for bit, or the process ends with 1. A time is the median
of 5 groups of calls.
"""

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm
from jaxtyping import Array, Float, Int
from timing import median_ms

from moe_jax.kernels.grouped_matmul.mosaic.by_experts import Part, outer
from moe_jax.kernels.grouped_matmul.mosaic.by_rows import matmul, row_tiles
from moe_jax.kernels.grouped_matmul.mosaic.gather import gather_rows
from moe_jax.kernels.grouped_matmul.mosaic.ring import CONSUMERS, ROW_ALIGNMENT, STEP, Tile, run_tiles
from moe_jax.kernels.mosaic_gpu import launch, operand_transforms
from moe_jax.kernels.routing import Plan, plan

TILE = Tile(rows=128, columns=256, stages=4)
IN_FLIGHT = 2
"""Steps whose copies may be under way when a further one's are started; the ring has room for one more beside them."""

VECTOR_BYTES = 16


def main() -> None:
    """Prints a row for each product and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"experts": 128, "top-k": 8, "hidden": 2048, "intermediate": 768, "launches": 10}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.experts} experts, {args.top_k} of them a token")
    print(f"{'tokens':>8}{'product':>9}{'of an expert':>15}" + "".join(f"{way:>12}" for way in ("before", "matmul", "inside")))
    agree = True
    for tokens in args.tokens:
        x = 0.1 * jax.random.normal(jax.random.key(0), (tokens, args.hidden), jnp.bfloat16)
        chosen = lax.top_k(jax.random.normal(jax.random.key(2), (tokens, args.experts)), args.top_k)[1]
        rows = jax.jit(lambda chosen: plan(chosen, args.experts, row_alignment=ROW_ALIGNMENT))(chosen)
        gathered, own = jax.jit(gather_rows)(x, rows), (rows.token_of_row < tokens)[:, None]
        for product, before, alone, inside in PRODUCTS:
            for columns in (2 * args.intermediate, args.intermediate):
                shape = (args.experts, columns, args.hidden) if product == "rows" else (rows.num_rows, columns)
                other = 0.1 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
                runs = (before, x), (alone, gathered), (inside, x)
                results = [jax.jit(run)(tokens_or_rows, other, rows) for run, tokens_or_rows in runs]
                if product == "rows":
                    results = [jnp.where(own, result, 0) for result in results]
                agree &= all(bool((result == results[0]).all()) for result in results)
                times = [median_ms(jax.jit(run), (first, other, rows), args.launches) for run, first in runs]
                size = f"{columns} x {args.hidden}"
                print(f"{tokens:>8}{product:>9}{size:>15}" + "".join(f"{t:>9.3f} ms" for t in times), flush=True)
    if not agree:
        sys.exit("the results differ")


def rows_before(x: Float[Array, "tokens hidden"], w: Float[Array, "experts out hidden"], rows: Plan) -> Array:
    """As the layer has it."""
    return matmul(gather_rows(x, rows), w, rows, TILE, transpose=False)


def rows_alone(x: Float[Array, "rows hidden"], w: Float[Array, "experts out hidden"], rows: Plan) -> Array:
    """Of rows that lie in order."""
    return matmul(x, w, rows, TILE, transpose=False)


def rows_inside(x: Float[Array, "tokens hidden"], w: Float[Array, "experts out hidden"], rows: Plan) -> Array:
    """The same with one kernel."""
    hidden, columns = w.shape[2], w.shape[1]
    column_tiles = columns // TILE.columns
    experts, first_rows, heights, num_row_tiles = row_tiles(rows, TILE.rows)
    tokens = tokens_of_rows(rows, len(x))

    def body(experts_ref, rows_ref, heights_ref, count_ref, tokens_ref, x_ref, w_ref, out_ref, *scratch):
        a_smem, b_smem, out_smem, full, empty = scratch
        steps = hidden // STEP

        def describe(index):
            i, part = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
            return steps, (experts_ref[i], pl.multiple_of(rows_ref[i], ROW_ALIGNMENT), heights_ref[i], part)

        def load(tile, k, slot, barrier):
            expert, row, _, part = tile
            ks, columns = pl.ds(k * STEP, STEP), pl.ds(part * TILE.columns, TILE.columns)
            plgpu.copy_gmem_to_smem(w_ref.at[expert, columns, ks], b_smem.at[slot], barrier)
            copy_rows(x_ref.at[:, ks], tokens_ref.at[pl.ds(row, TILE.rows)], a_smem.at[slot])
            arrive_later(k, steps, slot, full)

        def multiply(accumulator, tile, slot, warpgroup):
            own = pl.ds(TILE.first_row(warpgroup), TILE.own_rows)
            plgpu.wgmma(accumulator, a_smem.at[slot, own], b_smem.at[slot].transpose((1, 0)))

        def finish(accumulator, tile, warpgroup):
            _, row, height, part = tile
            first = TILE.first_row(warpgroup)

            @pl.when(first < height)
            def _():
                for c in range(0, TILE.columns, STEP):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_smem[warpgroup] = accumulator[:, c : c + STEP].astype(x.dtype)
                    plgpu.commit_smem()
                    place = pl.ds(row + first, TILE.own_rows), pl.ds(part * TILE.columns + c, STEP)
                    plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[place])

        tiles = count_ref[0] * column_tiles
        run_tiles(tiles, describe, load, multiply, finish, tile_shape=TILE, full=full, empty=empty)

    scratch = buffers((TILE.rows, STEP), (TILE.columns, STEP), x.dtype)
    out = jax.ShapeDtypeStruct((rows.num_rows, columns), x.dtype)
    run = launch("grouped_matmul_gathering", body, [out], scratch, warpgroups=CONSUMERS + 1)
    return run(experts, first_rows, heights, num_row_tiles, tokens, x, w)[0]


def outer_before(x: Float[Array, "tokens hidden"], dh: Float[Array, "rows out"], rows: Plan) -> Array:
    """As the layer has it."""
    return outer_alone(gather_rows(x, rows), dh, rows)


def outer_alone(x: Float[Array, "rows hidden"], dh: Float[Array, "rows out"], rows: Plan) -> Array:
    """Of rows that lie in order."""
    return outer([Part(dh, x, rows)], TILE, x.dtype)


def outer_inside(x: Float[Array, "tokens hidden"], dh: Float[Array, "rows out"], rows: Plan) -> Array:
    """The same with one kernel."""
    m, n = dh.shape[1], x.shape[1]
    row_tiles, column_tiles = m // TILE.rows, n // TILE.columns

    def body(offsets_ref, tokens_ref, dh_ref, x_ref, out_ref, *scratch):
        a_smem, b_smem, out_smem, full, empty = scratch

        def describe(index):
            expert = lax.div(index, jnp.int32(row_tiles * column_tiles))
            place = lax.rem(index, jnp.int32(row_tiles * column_tiles))
            first = pl.multiple_of(offsets_ref[expert], ROW_ALIGNMENT)
            steps = lax.div(offsets_ref[expert + 1] - first, jnp.int32(STEP))
            row = lax.div(place, jnp.int32(column_tiles)) * TILE.rows
            column = lax.rem(place, jnp.int32(column_tiles)) * TILE.columns
            return steps, (expert, first, steps, row, column)

        def load(tile, k, slot, barrier):
            _, first, steps, row, column = tile
            ks = pl.ds(first + k * STEP, STEP)
            plgpu.copy_gmem_to_smem(dh_ref.at[ks, pl.ds(row, TILE.rows)], a_smem.at[slot], barrier)
            copy_rows(x_ref.at[:, pl.ds(column, TILE.columns)], tokens_ref.at[ks], b_smem.at[slot])
            arrive_later(k, steps, slot, full)

        def multiply(accumulator, tile, slot, warpgroup):
            own = pl.ds(TILE.first_row(warpgroup), TILE.own_rows)
            plgpu.wgmma(accumulator, a_smem.at[slot, :, own].transpose((1, 0)), b_smem.at[slot])

        def finish(accumulator, tile, warpgroup):
            expert, _, _, row, column = tile
            first = row + TILE.first_row(warpgroup)
            for c in range(0, TILE.columns, STEP):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[warpgroup] = accumulator[:, c : c + STEP].astype(x.dtype)
                plgpu.commit_smem()
                place = expert, pl.ds(first, TILE.own_rows), pl.ds(column + c, STEP)
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[place])

        tiles = rows.num_experts * row_tiles * column_tiles
        run_tiles(tiles, describe, load, multiply, finish, tile_shape=TILE, full=full, empty=empty)

    out = jax.ShapeDtypeStruct((rows.num_experts, m, n), x.dtype)
    scratch = buffers((STEP, TILE.rows), (STEP, TILE.columns), x.dtype)
    run = launch("grouped_outer_gathering", body, [out], scratch, warpgroups=CONSUMERS + 1)
    return run(rows.offsets, tokens_of_rows(rows, len(x)), dh, x)[0]


PRODUCTS = ("rows", rows_before, rows_alone, rows_inside), ("outer", outer_before, outer_alone, outer_inside)


def tokens_of_rows(rows: Plan, num_tokens: int) -> Int[Array, "rows_and_a_tile"]:
    """-1 for rows of nobody, and for those of a tile that reaches beyond the last."""
    tokens = jnp.where(rows.token_of_row < num_tokens, rows.token_of_row, -1)
    return jnp.pad(tokens, (0, TILE.rows), constant_values=-1).astype(jnp.int32)


def buffers(a_shape: tuple[int, int], b_shape: tuple[int, int], dtype: jnp.dtype) -> list:
    """The ring's, one for results, and the ring's barriers: a slot is full when TMA and cp.async have brought their part."""
    swizzled = operand_transforms(dtype)
    return [
        plgpu.SMEM((TILE.stages, *a_shape), dtype, transforms=swizzled),
        plgpu.SMEM((TILE.stages, *b_shape), dtype, transforms=swizzled),
        plgpu.SMEM((CONSUMERS, TILE.own_rows, STEP), dtype, transforms=swizzled),
        plgpu.Barrier(num_arrivals=2, num_barriers=TILE.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=TILE.stages),
    ]


def copy_rows(x_ref, tokens_ref: Int[Array, "rows"], slot_ref) -> None:
    """Starts, as one group, slot[r] = x[tokens[r]], zeros where that is -1; a thread has 16 bytes of every few rows."""
    num_rows, columns = slot_ref.shape
    itemsize = jnp.dtype(slot_ref.dtype).itemsize
    vectors = columns * itemsize // VECTOR_BYTES
    rows_at_once = mgpu.WARPGROUP_SIZE // vectors

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(operand_transforms(slot_ref.dtype))))
    def copy(_, x, tokens, slot):
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))

        def constant(value, of=i32):
            return arith.constant(of, value)

        def place(row, vector):
            """Tiles of 8 rows x 128 bytes, in which 16 bytes number v of row r lie where number v xor r would."""
            tile = arith.addi(
                arith.muli(arith.divui(row, constant(8)), constant(vectors // 8)), arith.divui(vector, constant(8))
            )
            in_tile = arith.remui(row, constant(8))
            swizzled = arith.xori(arith.remui(vector, constant(8)), in_tile)
            lines = arith.addi(arith.muli(tile, constant(8)), in_tile)
            return arith.addi(arith.muli(lines, constant(128)), arith.muli(swizzled, constant(VECTOR_BYTES)))

        thread = arith.remui(mgpu.thread_idx(), constant(mgpu.WARPGROUP_SIZE))
        vector, first_row = arith.remui(thread, constant(vectors)), arith.divui(thread, constant(vectors))
        in_row = arith.extui(i64, arith.muli(vector, constant(VECTOR_BYTES)))
        (stride, _), _ = ir.MemRefType(x.type).get_strides_and_offset()
        in_global_memory = llvm.PointerType.get(address_space=1)
        for i in range(num_rows // rows_at_once):
            row = arith.addi(first_row, constant(i * rows_at_once))
            token = memref.load(tokens, [arith.index_cast(ir.IndexType.get(), row)])
            none = arith.cmpi(arith.CmpIPredicate.slt, token, constant(0))
            # Where nothing is read the address is still to be one.
            of_token = arith.extui(i64, arith.select(none, constant(0), token))
            offset = arith.addi(arith.muli(of_token, constant(stride * itemsize, i64)), in_row)
            nvvm.cp_async_shared_global(
                mgpu.getelementptr(mgpu.memref_ptr(slot), [place(row, vector)], i8),
                llvm.addrspacecast(in_global_memory, mgpu.getelementptr(mgpu.memref_ptr(x), [offset], i8)),
                VECTOR_BYTES,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=arith.select(none, constant(0), constant(VECTOR_BYTES)),
            )
        nvvm.cp_async_commit_group()

    copy(x_ref, tokens_ref, slot_ref)


def arrive_later(k, steps, slot, full) -> None:
    """Says of the step IN_FLIGHT before step k that its copies are there, and behind the last step of a tile of all."""

    def arrive(steps_before):
        wait_for_copies(steps_before)
        plgpu.barrier_arrive(full.at[lax.rem(slot + TILE.stages - steps_before, jnp.int32(TILE.stages))])

    pl.when(k >= IN_FLIGHT)(lambda: arrive(IN_FLIGHT))

    @pl.when(k == steps - 1)
    def _():
        for steps_before in reversed(range(IN_FLIGHT)):
            pl.when(k >= steps_before)(partial(arrive, steps_before))


def wait_for_copies(groups: int) -> None:
    """Until all but so many groups of every thread have arrived, where wgmma sees them."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(groups)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        mgpu.warpgroup_barrier()

    wait()


if __name__ == "__main__":
    main()
