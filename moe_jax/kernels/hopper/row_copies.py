"""Gathers rows from anywhere in memory into a pipeline's slot: a[source[r]], where TMA would copy rows r, r + 1, ...

    roles     producer: each thread copies 16 bytes at a time (`cp.async`); 8 threads copy a row's 128 bytes of one step
              consumers: wait for the slot's landed barrier in addition to its full barrier
    smem      landed: 8 bytes per slot, plain words to Pallas
    barriers  landed[slot]  128 arrivals, one per producer thread, made by the copies themselves when they have landed;
                            only the consumers wait (SonicMoE gathers in the same way, https://arxiv.org/abs/2512.14080)
    invariant piece p of row r is at p ^ (r mod 8), the 128-byte swizzle that wgmma expects
              the parity waited for follows from the step, since a consumer may skip phases

A tile's row numbers are in registers from its first step on. Reading them in each step, from memory or shared memory, made the
kernel 10 to 20 % slower, as if the load waited for earlier copies.

Pallas passes none of its barriers to `inline_mgpu`, so this file initializes and waits for its own. JAX's interpreter cannot
run `inline_mgpu`: rows are gathered before the kernel there. This file depends on `jaxlib.mlir` and `jax.experimental.mosaic`,
which may change with any release of JAX. A test in tests/kernels/experts/slow/test_mosaic_rows.py covers it on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm
from jaxtyping import Array, Int

from moe_jax.kernels.hopper.launch import SWIZZLED_COLUMNS, WARPGROUP_THREADS, operand_transforms

PIECE = 16
"""Bytes of one copy, the maximum of `cp.async`."""

ITEM = 2
"""Bytes of an element."""

ROW = ITEM * SWIZZLED_COLUMNS
"""Bytes of a row in a slot. The slot starts at a multiple of 1024."""

PIECES = ROW // PIECE

ROWS_AT_ONCE = WARPGROUP_THREADS // PIECES

SCALAR = plgpu.Layout.WG_SPLAT(())

I32, I64 = 32, 64


def landing_barriers(stages: int):
    """Returns the scratch for the barriers: 8 bytes per slot."""
    return plgpu.SMEM((2 * stages,), jnp.int32)


def initialize(landed) -> None:
    """Initializes the barriers. All warpgroups of a block call it before any of them uses a barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, landed):
        is_first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.BLOCK)
        for slot in range(landed.type.shape[0] // 2):
            nvvm.mbarrier_init(_barrier(landed, _constant(slot)), _constant(WARPGROUP_THREADS), predicate=is_first)
        nvvm.fence_mbarrier_init()
        gpu.barrier()

    emit(landed)


def read_sources(source_of_row, first_row: jax.Array, rows: int, num_sources: int) -> Int[Array, "copies"]:
    """Loads the source indices of `rows` rows from first_row on; each thread holds the indices of rows that it copies.

    Rows past the end of source_of_row use its last entry. A source outside [0, num_sources) becomes num_sources: rows without a
    token may have any number, and `start_copies` would compute an invalid address.
    """
    layout = _layout(rows)
    own_rows = rows // ROWS_AT_ONCE
    result = plgpu.ShapeDtypeStruct((own_rows * WARPGROUP_THREADS,), jnp.dtype(jnp.int32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=result)
    def emit(_, source_of_row, first_row):
        own_row = arith.addi(_value(first_row), arith.divui(_thread(), _constant(PIECES)))
        last = _constant(source_of_row.type.shape[0] - 1)
        sources = llvm.mlir_undef(ir.VectorType.get((own_rows,), _int(I32)))
        for i in range(own_rows):
            row = arith.minui(arith.addi(own_row, _constant(i * ROWS_AT_ONCE)), last)
            place = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source_of_row), [arith.extui(_int(I64), row)], _int(I32))
            source = arith.minui(llvm.load(_int(I32), place), _constant(num_sources))
            sources = llvm.insertelement(sources, source, _constant(i))
        return mgpu.FragmentedArray(_registers=np.array([sources], object), _layout=layout.to_mgpu(), _is_signed=True)

    return emit(source_of_row, first_row)


def start_copies(a, sources: Int[Array, "copies"], column: jax.Array, target, landed, slot: jax.Array) -> None:
    """Starts asynchronous copies (cp.async) of a[sources, column : column + 64] into `target` [rows, 64], a pipeline slot.

    A source outside `a` yields zeros. The slot's barrier completes its phase when the copies have landed.
    """
    (num_sources, columns), (rows, _) = a.shape, target.shape
    types = plgpu.RefType(), _layout(rows), SCALAR, plgpu.RefType(operand_transforms(a.dtype)), plgpu.RefType(), SCALAR

    @plgpu.inline_mgpu(arg_types=types)
    def emit(_, a, sources, column, target, landed, slot):
        row, piece = arith.divui(_thread(), _constant(PIECES)), arith.remui(_thread(), _constant(PIECES))
        swapped = arith.xori(piece, arith.remui(row, _constant(8)))
        own_target = _sum(_address(target, I32), _times(row, ROW), _times(swapped, PIECE))
        own_bytes = arith.addi(_times(_value(column), ITEM), _times(piece, PIECE))
        own_source = arith.addi(_address(a, I64), arith.extui(_int(I64), own_bytes))
        for i in range(rows // ROWS_AT_ONCE):
            source = llvm.extractelement(sources.registers.item(), _constant(i))
            is_row = arith.cmpi(arith.CmpIPredicate.ult, source, _constant(num_sources))
            offset = arith.muli(arith.extui(_int(I64), source), mgpu.c(ITEM * columns, _int(I64)))
            # Bytes read of the PIECE written. The rest is zero, so a source outside `a` yields zeros.
            bytes_read = arith.select(is_row, _constant(PIECE), _constant(0))
            place = arith.addi(own_target, _constant(i * ROWS_AT_ONCE * ROW))
            copy = f"cp.async.cg.shared.global [$0], [$1], {PIECE}, $2;"
            mgpu.utils.inline_ptx(copy, place, arith.addi(own_source, offset), bytes_read)
        barrier = llvm.ptrtoint(_int(I32), _barrier(landed, _value(slot)))
        mgpu.utils.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier)

    emit(a, sources, column, target, landed, slot)


def wait_for_copies(landed, step: jax.Array, stages: int) -> None:
    """Waits until the copies of a step have landed, and makes wgmma see them. `step` counts the steps of all tiles.

    `cp.async` writes through the generic proxy and wgmma reads through the async proxy: hence a fence in each thread that
    waits. The other direction needs no fence: the end of wgmma implies it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def emit(_, landed, slot, parity):
        ticks = _constant(10_000_000)  # How long the hardware may suspend the thread before it checks again.
        nvvm.mbarrier_try_wait_parity(_barrier(landed, _value(slot)), _value(parity), ticks)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;")

    # The parity follows from the step: a consumer without rows in a tile, or in the other's turn, skips phases.
    turns, slot = lax.div(step, jnp.int32(stages)), lax.rem(step, jnp.int32(stages))
    emit(landed, slot, lax.rem(turns, jnp.int32(2)))


def _layout(rows: int):
    """Returns the layout of an array with one number for each row that a thread copies. Its order is meaningless."""
    own_rows = rows // ROWS_AT_ONCE
    return plgpu.Layout.WG_STRIDED((own_rows * WARPGROUP_THREADS,), vec_size=own_rows)


def _barrier(landed, slot):
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(landed), [slot], _int(I64))


def _thread():
    """Returns the thread's number in the warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), _constant(WARPGROUP_THREADS))


def _address(reference, bits: int):
    return llvm.ptrtoint(_int(bits), mgpu.utils.memref_ptr(reference))


def _value(scalar):
    value = scalar.registers.item()
    return arith.index_cast(_int(I32), value) if isinstance(value.type, ir.IndexType) else value


def _times(value, factor: int):
    return arith.muli(value, _constant(factor))


def _sum(first, *others):
    for other in others:
        first = arith.addi(first, other)
    return first


def _constant(value: int):
    return mgpu.c(value, _int(I32))


def _int(bits: int):
    return ir.IntegerType.get_signless(bits)
