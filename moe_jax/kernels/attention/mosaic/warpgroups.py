"""What the attention kernels share: their launch, the order of their blocks, and matmuls whose left operand is in registers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.hopper.interpreter import is_interpreted, wgmma_registers
from moe_jax.kernels.hopper.launch import grid_size, operand_transforms
from moe_jax.kernels.hopper.launch import launch as launch_kernel

COMPUTERS = 2
"""Warpgroups that compute."""

OWN_ROWS = 64
"""Rows of one warpgroup: those of one wgmma."""

LOADER_REGISTERS, COMPUTER_REGISTERS = 24, 240
"""Registers a thread: together with 128 threads a warpgroup they fill the 65536 of a core."""

LOG2_E = math.log2(math.e)

NEVER = -1e30
"""A maximum below every score, finite so that differences are numbers."""

L2_BYTES = 32 * 2**20
"""Of an H100's or H200's 50 MiB, what k and v of blocks that run at a time may fill."""


@dataclass(frozen=True)
class Work:
    """The tiles of a kernel, one for each (batch, block of the sequence, head), and which a thread block computes, in order.

    Tiles come in sections of as many key heads as L2 holds, within a section the longest first. They are dealt to and fro,
    0 1 2 2 1 0 0 1 2, so that each thread block gets as many long ones as short ones: where a section gives it many. With
    one or two a section, the same blocks get the longest of every section.
    """

    batch: int
    heads: int
    kv_heads: int
    num_blocks: int
    """Along the sequence."""
    longest: Literal["first", "last"]
    """Where in the sequence the blocks with the most work are."""
    bytes_per_kv_head: int | None
    """Of what the tiles of one key head share; None: all tiles are one section."""

    def for_each_tile(self, body: Callable, carry):
        """carry = body(number of the block's tile, (batch, block, head, key head), carry) for each tile of this block."""
        own, blocks = lax.axis_index("block"), grid_size()
        full, rest = divmod(self.batch * self.heads * self.num_blocks, blocks)

        def position(turn):
            return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, own, blocks - 1 - own)

        count = full + (position(jnp.int32(full)) < rest).astype(jnp.int32)
        return lax.fori_loop(0, count, lambda turn, c: body(turn, self._place(turn * blocks + position(turn)), c), carry), count

    def _place(self, index):
        pairs, group = self.batch * self.kv_heads, self.heads // self.kv_heads
        fitting = pairs if self.bytes_per_kv_head is None else max(1, min(pairs, L2_BYTES // self.bytes_per_kv_head))
        section_pairs = next(n for n in range(fitting, 0, -1) if pairs % n == 0)
        section, index = _divmod(index, section_pairs * group * self.num_blocks)
        block, index = _divmod(index, section_pairs * group)
        pair, member = _divmod(index, group)
        b, kv_head = _divmod(section * section_pairs + pair, self.kv_heads)
        return b, block if self.longest == "first" else self.num_blocks - 1 - block, kv_head * group + member, kv_head


def _divmod(a, b: int):
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


SHARED_MEMORY_BYTES = 226 * 2**10
"""Of a core's 227 KiB, less what barriers and vectors of f32 take."""


@dataclass(frozen=True)
class Ring:
    """Blocks of the operand that a kernel runs over: tokens of one, and how many shared memory holds."""

    block: int
    stages: int

    def slot(self, visit):
        """Where in the ring a visit's block lies; opaque to the compiler for the reason of `own_rows`."""
        return lax.optimization_barrier(lax.rem(visit, jnp.int32(self.stages)))

    def wait_until_free(self, empty, visit) -> None:
        """Waits until the slot of a visit has been read by the visit before it; slots start free."""

        @pl.when(visit >= self.stages)
        def _():
            plgpu.barrier_wait(empty.at[self.slot(visit)])

    def drain(self, empty, visited) -> None:
        """Waits for every arrival, so that no barrier ends with a phase that its waiter has not seen."""
        for i in range(self.stages):
            self.wait_until_free(empty, visited + i)


def largest_ring(block: int, width: int, resident: int) -> Ring:
    """Up to four blocks of `width` 16-bit elements a token, in the shared memory that `resident` elements leave."""
    return Ring(block, min(4, (SHARED_MEMORY_BYTES - 2 * resident) // (2 * block * width)))


def own_rows(warpgroup):
    """A warpgroup's rows of a block. Called in a loop it keeps what is computed from them there.

    Moved before the loop, the addresses of every step of every wgmma would fill tens of registers.
    """
    return pl.ds(lax.optimization_barrier(warpgroup) * OWN_ROWS, OWN_ROWS)


def own_tokens(first_row):
    """[OWN_ROWS] the sequence indices of a warpgroup's rows."""
    return first_row + plgpu.broadcasted_iota(jnp.int32, (OWN_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def in_interval(shape: tuple[int, int], first_column, low, high):
    """[m, n] whether low[row] <= first_column + column <= high[row]."""
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    above = column >= broadcast_columns(low - first_column, shape)
    return above & (column <= broadcast_columns(high - first_column, shape))


def broadcast_columns(rows, shape: tuple[int, int]):
    """[m] -> [m, n]."""
    return lax.broadcast_in_dim(rows, shape, [0])


def broadcast_rows(columns, shape: tuple[int, int]):
    """[n] -> [m, n]."""
    return lax.broadcast_in_dim(columns, shape, [1])


def scores(a, b):
    """a b^T of two references."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def weighted_sum(out, weights, v, staging):
    """out + weights v."""

    def multiply(accumulator):
        if staging is None:
            accumulator[...] = out
        wgmma_registers(accumulator, weights, v, staging)
        return accumulator[...]

    product = pl.run_scoped(multiply, plgpu.ACC(out.shape, jnp.float32))
    # The interpreter cannot set an accumulator.
    return product if staging is None else product + out


def scores_and_weighted_sum(q, k, out, weights, v, issued: Callable, between: Callable, staging):
    """(between(q k^T), out + weights v): `between` runs beside the second matmul, `issued` when both have been started."""

    def multiply(s, o):
        if staging is None:
            o[...] = out
        plgpu.wgmma(s, q, k.transpose((1, 0)))
        wgmma_registers(o, weights, v, staging)
        issued()
        result = between(plgpu.wgmma_accumulator_load(s, wait_n=1))
        return result, o[...]

    shape = q.shape[0], k.shape[0]
    result, product = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(out.shape, jnp.float32))
    return result, product if staging is None else product + out


def launch(name: str, body: Callable, outputs: list, scratch: list, dtype: jnp.dtype) -> Callable:
    """`body(*inputs, *outputs, *scratch)` runs in every warpgroup of every block.

    A tuple in `scratch` is the shape of what `wgmma_registers` stages, one for each computing warpgroup; None on a GPU.
    """
    stages = [i for i, s in enumerate(scratch) if isinstance(s, tuple)]
    for i in stages:
        scratch[i] = plgpu.SMEM((COMPUTERS, *scratch[i]), dtype, transforms=operand_transforms(dtype))
    if not is_interpreted():
        for i in reversed(stages):
            del scratch[i]

    def with_stages(*references):
        references = list(references)
        if not is_interpreted():
            first = len(references) - len(scratch)
            for i in stages:
                references.insert(first + i, None)
        body(*references)

    return launch_kernel(name, with_stages, outputs, scratch, warpgroups=COMPUTERS + 1)
