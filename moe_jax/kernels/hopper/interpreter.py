"""Kernels' special cases for JAX's GPU interpreter, which runs them on a CPU, slowly.

The interpreter's race detector is off: a user on a CPU wants results. JAX's `plgpu.force_gpu_interpret_mode` turns it on for
the kernels that are traced inside it, as `tests/helpers/races.py` does. The mode is part of the key of jit's caches: a kernel
that was traced without the detector is traced again.

Other differences are in the kernels' own files. `experts.mosaic` gathers the rows that `row_copies` would gather. Attention
adds to an accumulator after the matmul, since the interpreter cannot set one before it. The interpreter sums a step's products
before it adds them to an accumulator. So kernels whose bits must be equal use equal steps and tiles there (`by_pairs`,
`strict.matmul`).
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from moe_jax.kernels.backends import is_interpreted

INTERPRETED_BLOCKS = 2
"""Thread blocks of a kernel. The interpreter runs them in turn; with two, neither has all tiles."""


def interpret() -> plgpu.InterpretGPUParams | bool:
    """Returns the `interpret` argument of `pallas_call`: False on a GPU."""
    return plgpu.InterpretGPUParams(detect_races=False) if is_interpreted() else False


def operand_staging(shape: tuple[int, ...], dtype: DTypeLike, transforms: tuple = ()) -> Any:
    """Returns the scratch through which `wgmma_registers` passes its left operands in the interpreter; None on a GPU."""
    return plgpu.SMEM(shape, dtype, transforms=transforms) if is_interpreted() else None


def wgmma_registers(accumulator, a, b, staging) -> None:
    """Issues accumulator += a @ b with `a` in registers. The interpreter multiplies references only: there, `a` is copied to
    `staging`, which is None on a GPU."""
    if staging is not None:
        staging[...] = a
        plgpu.commit_smem()
        a = staging
    plgpu.wgmma(accumulator, a, b)


def add_to_memory(source, target) -> None:
    """Starts target += source, of f32 in shared memory and in memory, as a TMA copy that adds.

    The interpreter has no such copy. There, the sum is computed in `source` and copied.
    """
    if not is_interpreted():
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")
        return
    source[...] += plgpu.load(target, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target)


def finish_reading() -> None:
    """Orders a warpgroup's plain loads from a slot before its release; a no-op on a GPU.

    On a GPU this does nothing: each thread arrives at the slot's barrier after its own loads. The interpreter's race detector
    needs a fence.
    """
    if is_interpreted():
        plgpu.commit_smem()
