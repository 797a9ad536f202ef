"""What two multiplying warpgroups that take turns would gain: one multiplies a tile of its own while the other stores one.

    python benchmarks/by_turns.py                                  # Qwen3-30B-A3B's layer on a Hopper GPU
    python benchmarks/by_turns.py --tokens 16384 --experts 256 --hidden 7168 --intermediate 2048 --launches 3
    python benchmarks/by_turns.py --tokens 300 --experts 3 --top-k 1 --hidden 384 --intermediate 384 --launches 1  # interpreted

The plain products of a layer, rows in expert order: *down* act @ w_down.T, *dx* dh @ w_gate_up, *dw_gate_up* and *dw_down*.
*together* are the kernels as they are, whose warpgroups halve a tile; *by turns* (CUTLASS's ping-pong) those below, with tiles
of rows x columns a warpgroup. Results must agree but for one rounding, or the process ends with 1. A time is the median of 3
rounds, in which the ways follow each other, of the median of 5 groups of calls.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float
from timing import median_ms

from moe_jax.kernels.grouped_matmul.mosaic.by_experts import Part, outer
from moe_jax.kernels.grouped_matmul.mosaic.by_rows import matmul, row_tiles
from moe_jax.kernels.grouped_matmul.mosaic.ring import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOADER_REGISTERS,
    ROW_ALIGNMENT,
    STEP,
    Tile,
)
from moe_jax.kernels.grouped_matmul.mosaic.tile_order import place_in_order, row_tile_in_order, rows_in_group
from moe_jax.kernels.mosaic_gpu import launch, operand_transforms
from moe_jax.kernels.routing import Plan, plan

BY_TURNS = (Tile(128, 128, 5), Tile(128, 192, 4))
CHUNK = 64


def main() -> None:
    """Prints a row for each product and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"experts": 128, "top-k": 8, "hidden": 2048, "intermediate": 768, "launches": 10}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    args = parser.parse_args()
    experts, hidden, inter = args.experts, args.hidden, args.intermediate
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {experts} experts, {args.top_k} of them a token")
    ways = ["together", *(f"{tile.rows}x{tile.columns}" for tile in BY_TURNS)]
    print(f"{'tokens':>8}{'product':>12}" + "".join(f"{way:>13}" for way in ways))
    agree = True
    for tokens in args.tokens:
        chosen = lax.top_k(jax.random.normal(jax.random.key(0), (tokens, experts)), args.top_k)[1]
        rows = jax.jit(lambda chosen: plan(chosen, experts, row_alignment=ROW_ALIGNMENT))(chosen)
        own = jnp.arange(rows.num_rows) < rows.offsets[-1]
        x, dh, act = (normal(i, own.size, n) * own[:, None] for i, n in enumerate((hidden, 2 * inter, inter)))
        w_gate_up, w_down = normal(3, experts, 2 * inter, hidden), normal(4, experts, hidden, inter)
        for name, product, a, b in (
            ("down", rows_product, act, w_down),
            ("dx", partial(rows_product, transpose=True), dh, w_gate_up),
            ("dw_gate_up", outer_product, dh, x),
            ("dw_down", outer_product, x, act),
        ):
            together, by_turns = product(a, b)
            ways = [together, *(by_turns(tile) for tile in BY_TURNS)]
            compiled = [jax.jit(way).lower(a, b, rows).compile() for way in ways]
            results = [run(a, b, rows) for run in compiled]
            if product is not outer_product:
                results = [jnp.where(own[:, None], result, 0) for result in results]
            agree &= all(bool(jnp.allclose(result, results[0], rtol=2**-7, atol=1e-4)) for result in results)
            del results
            rounds = [[median_ms(run, (a, b, rows), args.launches) for run in compiled] for _ in range(3)]
            print(f"{tokens:>8}{name:>12}" + "".join(f"{statistics.median(t):>10.3f} ms" for t in zip(*rounds, strict=True)))
    if not agree:
        sys.exit("the results differ")


def normal(seed: int, *shape: int) -> Array:
    """Drawn one slice at a time: the random bits of all experts' matrices are larger than they."""
    keys = jax.random.split(jax.random.key(seed), shape[0] if len(shape) == 3 else 1)
    dims = shape[-2:]
    return jax.jit(lambda: lax.map(lambda key: 0.1 * jax.random.normal(key, dims, jnp.bfloat16), keys).reshape(shape))()


def widest(columns: int) -> int:
    """As the rule has it, of tiles that the warpgroups halve."""
    return max(width for width in (64, 128, 192, 256) if columns % width == 0)


def rows_product(a: Array, w: Array, *, transpose: bool = False) -> tuple[Callable, Callable]:
    """a[r] @ w[e(r)].T, or @ w[e(r)] with `transpose`: as it is, and by turns with a tile."""
    tile = Tile(128, widest(w.shape[2 if transpose else 1]), 3)
    return partial(matmul, tile=tile, transpose=transpose), partial(by_rows, transpose=transpose)


def outer_product(a: Array, b: Array) -> tuple[Callable, Callable]:
    """sum over the rows r of e of outer(a[r], b[r])."""
    tile = Tile(128, widest(b.shape[1]), 4)
    return lambda a, b, plan: outer([Part(a, b, plan)], tile, a.dtype), by_experts


def by_rows(tile: Tile, *, transpose: bool) -> Callable:
    """Columns beyond the last are read as zeros and not written, so that any width will do."""

    def run(a: Float[Array, "rows k"], w: Float[Array, "experts ..."], plan: Plan) -> Float[Array, "rows n"]:
        summands, columns = a.shape[1], w.shape[2] if transpose else w.shape[1]
        column_tiles = -(-columns // tile.columns)
        group = rows_in_group((columns, summands), a.dtype)

        def body(
            experts_ref, rows_ref, heights_ref, first_tiles_ref, num_tiles_ref, total_ref, a_ref, w_ref, out_ref, *scratch
        ):
            a_smem, b_smem, out_smem, full, empty = scratch

            def describe(index):
                i, part = row_tile_in_order(index, first_tiles_ref, num_tiles_ref, column_tiles, group)
                row = pl.multiple_of(rows_ref[i], ROW_ALIGNMENT)
                return summands // STEP, (experts_ref[i], row, heights_ref[i], part * tile.columns)

            def load(place, k, slot, barrier):
                expert, row, _, column = place
                ks, columns = pl.ds(k * STEP, STEP), pl.ds(column, tile.columns)
                plgpu.copy_gmem_to_smem(a_ref.at[pl.ds(row, tile.rows), ks], a_smem.at[slot], barrier)
                source = w_ref.at[expert, ks, columns] if transpose else w_ref.at[expert, columns, ks]
                plgpu.copy_gmem_to_smem(source, b_smem.at[slot], barrier)

            def multiply(accumulator, slot):
                plgpu.wgmma(accumulator, a_smem.at[slot], b_smem.at[slot] if transpose else b_smem.at[slot].transpose((1, 0)))

            def halves(place, c):
                """Rows below an expert's last block belong to the next expert."""
                _, row, height, column = place
                of_columns = pl.ds(column + c, CHUNK)
                return [(half, height > half, out_ref.at[pl.ds(row + half, 64), of_columns]) for half in (0, 64)]

            run_by_turns(total_ref[0] * column_tiles, describe, load, multiply, halves, tile, out_smem, full, empty)

        b_shape = (STEP, tile.columns) if transpose else (tile.columns, STEP)
        out = jax.ShapeDtypeStruct((a.shape[0], columns), a.dtype)
        kernel = launch("by_turns", body, [out], buffers(tile, (tile.rows, STEP), b_shape, a.dtype), warpgroups=CONSUMERS + 1)
        return kernel(*row_tiles(plan, tile.rows), a, w)[0]

    return run


def by_experts(tile: Tile) -> Callable:
    """The experts' own products of columns."""

    def run(a: Float[Array, "rows m"], b: Float[Array, "rows n"], plan: Plan) -> Float[Array, "experts m n"]:
        m, n = a.shape[1], b.shape[1]
        row_tiles, column_tiles = -(-m // tile.rows), -(-n // tile.columns)
        group = rows_in_group((m, n), a.dtype)

        def body(offsets_ref, a_ref, b_ref, out_ref, *scratch):
            a_smem, b_smem, out_smem, full, empty = scratch

            def describe(index):
                expert = lax.div(index, jnp.int32(row_tiles * column_tiles))
                place = lax.rem(index, jnp.int32(row_tiles * column_tiles))
                row, column = place_in_order(place, row_tiles, column_tiles, group)
                first = pl.multiple_of(offsets_ref[expert], ROW_ALIGNMENT)
                steps = lax.div(offsets_ref[expert + 1] - first, jnp.int32(STEP))
                return steps, (expert, first, row * tile.rows, column * tile.columns)

            def load(place, k, slot, barrier):
                _, first, row, column = place
                ks = pl.ds(first + k * STEP, STEP)
                plgpu.copy_gmem_to_smem(a_ref.at[ks, pl.ds(row, tile.rows)], a_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(b_ref.at[ks, pl.ds(column, tile.columns)], b_smem.at[slot], barrier)

            def multiply(accumulator, slot):
                plgpu.wgmma(accumulator, a_smem.at[slot].transpose((1, 0)), b_smem.at[slot])

            def halves(place, c):
                expert, _, row, column = place
                of_columns = pl.ds(column + c, CHUNK)
                return [(half, None, out_ref.at[expert, pl.ds(row + half, 64), of_columns]) for half in (0, 64)]

            tiles = plan.num_experts * row_tiles * column_tiles
            run_by_turns(tiles, describe, load, multiply, halves, tile, out_smem, full, empty)

        out = jax.ShapeDtypeStruct((plan.num_experts, m, n), a.dtype)
        scratch = buffers(tile, (STEP, tile.rows), (STEP, tile.columns), a.dtype)
        return launch("outer_by_turns", body, [out], scratch, warpgroups=CONSUMERS + 1)(plan.offsets, a, b)[0]

    return run


def buffers(tile: Tile, a_shape: tuple[int, int], b_shape: tuple[int, int], dtype: jnp.dtype) -> list:
    """The ring's, two chunks on their way out for each warpgroup, and barriers: a slot is full for one of the warpgroups."""
    swizzled = operand_transforms(dtype)
    return [
        plgpu.SMEM((tile.stages, *a_shape), dtype, transforms=swizzled),
        plgpu.SMEM((tile.stages, *b_shape), dtype, transforms=swizzled),
        plgpu.SMEM((CONSUMERS, 2, tile.rows, CHUNK), dtype, transforms=swizzled),
        plgpu.Barrier(num_arrivals=2, num_barriers=(CONSUMERS, tile.stages)),
        plgpu.Barrier(num_arrivals=1, num_barriers=tile.stages),
    ]


def run_by_turns(num_tiles, describe, load, multiply, halves, tile: Tile, out_smem, full, empty) -> None:
    """A block's tiles go to its warpgroups in turn. The ring carries one tile's steps after the other's, so that a warpgroup
    begins when its own arrive, which is when the other has read its last."""
    warpgroup = lax.axis_index("warpgroup")

    def slot_of(step):
        return lax.rem(step, jnp.int32(tile.stages))

    def wait_until_empty(step):
        pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(empty.at[slot_of(step)]))

    @pl.when(warpgroup == CONSUMERS)
    def _load():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=(jnp.int32(0), jnp.int32(0)))
        def total(info, carry):
            before, turn = carry
            num_steps, place = describe(info.index[0])

            @pl.loop(0, num_steps)
            def _steps(k):
                wait_until_empty(before + k)
                slot = slot_of(before + k)
                load(place, k, slot, full.at[turn, slot])

            return before + num_steps, 1 - turn

        for i in range(tile.stages):
            wait_until_empty(total[0] + i)

    @pl.when(warpgroup < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=(jnp.int32(0), jnp.int32(0)))
        def _tiles(info, carry):
            before, turn = carry
            num_steps, place = describe(info.index[0])

            def accumulate(reference):
                @pl.loop(0, num_steps)
                def _steps(k):
                    slot = slot_of(before + k)
                    plgpu.barrier_wait(full.at[warpgroup, slot])
                    multiply(reference, slot)
                    plgpu.wgmma_wait(1)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[slot_of(before + k - 1)]))

                total = reference[...]
                pl.when(num_steps > 0)(lambda: plgpu.barrier_arrive(empty.at[slot_of(before + num_steps - 1)]))
                return total

            @pl.when(turn == warpgroup)
            def _():
                total = pl.run_scoped(accumulate, plgpu.ACC((tile.rows, tile.columns), jnp.float32))
                for i, c in enumerate(range(0, tile.columns, CHUNK)):
                    plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                    out_smem[warpgroup, i % 2] = total[:, c : c + CHUNK].astype(out_smem.dtype)
                    plgpu.commit_smem()
                    for first, applies, target in halves(place, c):
                        source = out_smem.at[warpgroup, i % 2, pl.ds(first, 64)]
                        if applies is None:
                            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
                        else:
                            pl.when(applies)(
                                lambda source=source, target=target: plgpu.copy_smem_to_gmem(source, target, commit_group=False)
                            )
                    plgpu.commit_smem_to_gmem_group()

            return before + num_steps, 1 - turn

        plgpu.wait_smem_to_gmem(0)


if __name__ == "__main__":
    main()
