"""Shows what the bits of one bf16 wgmma sum depend on, on a Hopper GPU.

    python benchmarks/wgmma_bits.py

A sum is one element of a b^T, K summands in steps of 16 in f32. Each row of the table computes all sums twice, in two ways that
differ in one thing alone, and counts sums whose bits differ:

    row       the same row of a at another of the 64 rows of the tile
    others    other rows beside it: random ones, zeros, large ones, NaN
    width     tiles of N = 8 to 256 columns in place of N = 64
    swapped   b's rows on the left and a's rows on the right, the result transposed
    registers a from registers in place of shared memory

Batch-invariant results need 0 everywhere: a token's row then has the same bits in every batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.hopper.interpreter import operand_staging, wgmma_registers
from moe_jax.kernels.hopper.launch import launch, operand_transforms

ROWS = 64
STEP = 64


def products(a: jax.Array, b: jax.Array, *, from_registers: bool = False) -> jax.Array:
    """Returns a b^T in f32 for a [64, K] and b [N, K], with one wgmma tile."""
    (_, summands), columns, dtype = a.shape, b.shape[0], a.dtype

    def body(a_ref, b_ref, out_ref, a_tile, b_tile, staging, barrier):
        def multiply(accumulator):
            def step(k, _):
                part = pl.ds(k * STEP, STEP)
                plgpu.copy_gmem_to_smem(a_ref.at[:, part], a_tile, barrier)
                plgpu.copy_gmem_to_smem(b_ref.at[:, part], b_tile, barrier)
                plgpu.barrier_wait(barrier)
                if from_registers:
                    registers = plgpu.load(a_tile, layout=plgpu.Layout.WGMMA)
                    wgmma_registers(accumulator, registers, b_tile.transpose((1, 0)), staging)
                else:
                    plgpu.wgmma(accumulator, a_tile, b_tile.transpose((1, 0)))
                plgpu.wgmma_wait(0)

            jax.lax.fori_loop(0, summands // STEP, step, None)
            return accumulator[...]

        @pl.when(jax.lax.axis_index("block") == 0)
        def _():
            out_ref[...] = pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))

    scratch = [
        plgpu.SMEM((ROWS, STEP), dtype, transforms=operand_transforms(dtype)),
        plgpu.SMEM((columns, STEP), dtype, transforms=operand_transforms(dtype)),
        operand_staging((ROWS, STEP), dtype),
        plgpu.Barrier(num_arrivals=2),
    ]
    outputs = [jax.ShapeDtypeStruct((ROWS, columns), jnp.float32)]
    return launch("wgmma_bits", body, outputs, scratch, warpgroups=1, blocks_per_core=1)(a, b)[0]


def main() -> None:
    """Prints the table."""
    rng = np.random.default_rng(0)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for summands in (128, 768, 2048, 4096):
        scale = np.exp(rng.normal(0, 2, (1, summands)))
        a, b = (jnp.asarray(rng.normal(0, 1, (n, summands)) * scale, jnp.bfloat16) for n in (ROWS, 256))
        reference = np.asarray(products(a, b[:64]))
        exact = np.asarray(a, np.float64) @ np.asarray(b[:64], np.float64).T
        error = np.abs(reference - exact).max() / np.abs(exact).max()

        def differing(result, of=reference):
            return int((np.asarray(result).view(np.int32) != of.view(np.int32)).sum())

        rolled = [differing(np.roll(np.asarray(products(jnp.roll(a, n, 0), b[:64])), -n, 0)) for n in range(1, ROWS, 7)]
        others = []
        for fill in (0.0, 1e30, float("nan"), None):
            beside = jnp.asarray(rng.normal(0, 1, a.shape), a.dtype) if fill is None else jnp.full_like(a, fill)
            found = np.asarray(products(beside.at[::5].set(a[::5]), b[:64]))
            others.append(differing(found[::5], reference[::5].copy()))
        whole = np.asarray(products(a, b))
        widths = {n: differing(products(a, b[:n]), whole[:, :n].copy()) for n in (8, 16, 24, 32, 64, 96, 128, 192, 256)}
        swapped = differing(np.asarray(products(b[:64], a)).T.copy())
        registers = differing(products(a, b[:64], from_registers=True))
        print(
            f"{summands:>5} summands, largest error {error:.1e}: sums that differ: row {rolled}, others {others}, "
            f"width {widths}, swapped {swapped}, registers {registers}",
            flush=True,
        )


if __name__ == "__main__":
    main()
