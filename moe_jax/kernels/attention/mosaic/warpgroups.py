"""The parts that the attention kernels share: launch by names, the tile scheduler, and accesses to registers and memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.hopper.interpreter import is_interpreted, wgmma_registers
from moe_jax.kernels.hopper.launch import grid_size, operand_transforms
from moe_jax.kernels.hopper.launch import launch as launch_kernel
from moe_jax.kernels.hopper.pipeline import CONSUMERS, SHARED_MEMORY, WGMMA_ROWS

RESIDENT_BLOCK = CONSUMERS * WGMMA_ROWS
"""Tokens of the block that stays in shared memory while a tile's loop runs over the blocks of the other side."""

LOG2_E = math.log2(math.e)

L2_BYTES = 32 * 2**20
"""The part of an H100's or H200's 50 MiB that k and v of concurrently running tiles may fill."""

RESERVED_BYTES = 2**10
"""Shared memory kept for barriers and vectors of f32."""

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""The layout of one number for each row of a wgmma's result."""

COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""The layout of one number for each column of a wgmma's result."""


def launch(name: str, kernel: Callable, inputs: Any, outputs: Any, scratch: Any) -> Any:
    """Launches a persistent kernel `kernel(inputs, outputs, scratch)` with named operands, in every warpgroup.

    `inputs` holds arrays, `outputs` the shapes of results and `scratch` what `pl.run_scoped` allocates. A field may be None,
    and is None in the kernel too. Returns `outputs` with arrays.
    """
    types, results = jax.tree.structure(inputs), jax.tree.structure(outputs)

    def with_names(*references):
        *references, buffers = references
        given, wanted = references[: types.num_leaves], references[types.num_leaves :]
        kernel(jax.tree.unflatten(types, given), jax.tree.unflatten(results, wanted), buffers)

    run = launch_kernel(name, with_names, jax.tree.leaves(outputs), [scratch], warpgroups=CONSUMERS + 1)
    return jax.tree.unflatten(results, run(*jax.tree.leaves(inputs)))


class WorkTile(NamedTuple):
    """The output tile that a thread block computes at a time: one block of the sequence for one head."""

    batch: int | jax.Array
    block: int | jax.Array
    """m_block, a block of queries, or n_block, a block of keys."""
    head: int | jax.Array
    kv_head: int | jax.Array


@dataclass(frozen=True)
class TileScheduler:
    """The tiles of a kernel, one for each (batch, block of the sequence, head), and the order in which thread blocks compute
    them. A section has the tiles of the key heads that fit in L2, the longest first. Tiles are assigned back and forth, 0 1 2 2
    1 0 0 1 2. With many tiles per section, each thread block gets an equal share of long and short ones. With one or two tiles
    per section, the same thread blocks get the longest of every section.
    """

    batch: int
    heads: int
    kv_heads: int
    num_blocks: int
    """Blocks of the sequence."""
    longest: Literal["first", "last"]
    """The end of the sequence at which blocks have the most work."""
    bytes_per_kv_head: int | None
    """Bytes that the tiles of one key head share; None: all tiles are one section."""

    def for_each_tile(self, body: Callable, carry):
        """Runs carry = body(number, tile, carry) over this thread block's tiles; returns (carry, number of tiles)."""
        own, blocks = lax.axis_index("block"), grid_size()
        full_rounds, rest = divmod(self.batch * self.heads * self.num_blocks, blocks)

        def position(deal):
            return jnp.where(lax.rem(deal, jnp.int32(2)) == 0, own, blocks - 1 - own)

        count = full_rounds + (position(jnp.int32(full_rounds)) < rest).astype(jnp.int32)
        return lax.fori_loop(0, count, lambda deal, c: body(deal, self._tile(deal * blocks + position(deal)), c), carry), count

    def _tile(self, index) -> WorkTile:
        pairs, group = self.batch * self.kv_heads, self.heads // self.kv_heads
        fitting = pairs if self.bytes_per_kv_head is None else max(1, min(pairs, L2_BYTES // self.bytes_per_kv_head))
        section_pairs = next(n for n in range(fitting, 0, -1) if pairs % n == 0)
        section, index = _divmod(index, section_pairs * group * self.num_blocks)
        block, index = _divmod(index, section_pairs * group)
        pair, member = _divmod(index, group)
        batch, kv_head = _divmod(section * section_pairs + pair, self.kv_heads)
        block = block if self.longest == "first" else self.num_blocks - 1 - block
        return WorkTile(batch, block, kv_head * group + member, kv_head)


def _divmod(a, b: int):
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


class StagedBlocks(NamedTuple):
    """Pipelining of a tile's loop: `block` tokens per step, `stages` steps in shared memory at a time."""

    block: int
    stages: int


def most_stages(block: int, width: int, resident: int) -> StagedBlocks:
    """Returns the deepest pipeline (at most 4 stages) that fits in shared memory next to `resident` 16-bit elements."""
    return StagedBlocks(block, min(4, (SHARED_MEMORY - RESERVED_BYTES - 2 * resident) // (2 * block * width)))


def operand(*shape: int, dtype: jnp.dtype) -> pl.MemoryRef:
    """Returns scratch for a 16-bit operand in shared memory, in the swizzled layout of wgmma and TMA."""
    return plgpu.SMEM(shape, dtype, transforms=operand_transforms(dtype))


def interpreter_staging(columns: int, dtype: jnp.dtype) -> pl.MemoryRef | None:
    """Allocates the copy in shared memory of wgmma's left operand that only the interpreter needs; None on a GPU.

    The interpreter multiplies references only. `multiply_registers` passes p or ds, which are in registers, through this copy.
    """
    return operand(CONSUMERS, WGMMA_ROWS, columns, dtype=dtype) if is_interpreted() else None


def own_rows(warpgroup):
    """Returns the row slice of a warpgroup in a block. Call it in the loop, so that the compiler does not hoist it.

    Moved before the loop, the addresses of every step of every wgmma would fill tens of registers.
    """
    return pl.ds(lax.optimization_barrier(warpgroup) * WGMMA_ROWS, WGMMA_ROWS)


def load_rows(reference):
    """Loads one value per row of a warpgroup from global memory."""
    return plgpu.load(reference, layout=ROWS, optimized=False)


def load_tile(reference):
    """Loads [WGMMA_ROWS, columns] from global memory, in the register layout of wgmma results."""
    return plgpu.load(reference, layout=plgpu.Layout.WGMMA, optimized=False)


def broadcast_columns(rows, shape: tuple[int, int]):
    """Broadcasts one value per row to [m, n]."""
    return lax.broadcast_in_dim(rows, shape, [0])


def broadcast_rows(columns, shape: tuple[int, int]):
    """Broadcasts one value per column to [m, n]."""
    return lax.broadcast_in_dim(columns, shape, [1])


def start_accumulator(accumulator, value) -> None:
    """Initializes a wgmma accumulator. The interpreter cannot: there `read_accumulator` adds the value."""
    if not is_interpreted():
        accumulator[...] = value


def read_accumulator(accumulator, started_with):
    """Waits for all wgmmas and returns the accumulator, which started with `started_with`."""
    return accumulator[...] + started_with if is_interpreted() else accumulator[...]


def multiply_registers(accumulator, a, b, staging, warpgroup) -> None:
    """Issues accumulator += a b with `a` in registers; `staging` is from `interpreter_staging`."""
    wgmma_registers(accumulator, a, b, None if staging is None else staging.at[warpgroup])
