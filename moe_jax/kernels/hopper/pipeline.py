"""The pipeline between the loading and the computing warpgroups, and the constants that all Hopper kernels share.

The producer copies operands into a ring of `stages` slots in shared memory; two consumers read them. (Warp specialization as in
CUTLASS's `PipelineTmaAsync` and FlashAttention-3, https://arxiv.org/abs/2407.08608 section 3.1). Each slot has two barriers:

    full   completes when the slot's copies have landed. TMA arrives there itself. Each consumer waits for it.
    empty  completes when every consumer has released the slot. The producer waits for it, except in the first `stages` steps.

    step         0      1      2      3      4              stages = 2: slot = step mod 2
    producer     L0     L1     L2     L3     L4   drain     acquire(2) waits for the release of step 0
    consumers           M0     M1     M2     M3     M4      wait(slot), compute, release(slot)

`step` counts the steps of all tiles of a thread block, so the ring continues from one tile to the next without a bubble. A
kernel with a loading warpgroup looks like this:

    class Scratch(NamedTuple):                            # swizzled buffers first: each starts at a multiple of 1024 bytes
        a: Any
        b: Any
        pipe: Pipeline

    scratch = Scratch(
        plgpu.SMEM((3, 128, 64), dtype, transforms=swizzled),
        plgpu.SMEM((3, 256, 64), dtype, transforms=swizzled),
        Pipeline.allocate(stages=3, copies=2),            # two TMA copies fill a slot: one of a, one of b
    )

    def body(a_ref, b_ref, out_ref, scratch):             # launch(name, body, outputs, [scratch], warpgroups=CONSUMERS + 1)
        pipe = scratch.pipe                               # the same object, now with references to barriers

        def produce():
            @pl.loop(0, num_steps)
            def _(step):
                pipe.acquire(step)
                slot = pipe.slot(step)
                plgpu.copy_gmem_to_smem(a_ref.at[...], scratch.a.at[slot], pipe.full_barrier(slot))
                plgpu.copy_gmem_to_smem(b_ref.at[...], scratch.b.at[slot], pipe.full_barrier(slot))
            pipe.drain(num_steps)

        def consume(warpgroup):
            @pl.loop(0, num_steps)
            def _(step):
                slot = pipe.slot(step)
                pipe.wait(slot)
                plgpu.wgmma(accumulator, scratch.a.at[slot], scratch.b.at[slot])
                plgpu.wgmma_wait(0)
                pipe.release(slot)

        run_roles(produce, consume, MATMUL_REGISTERS)

`launch` runs the body in every warpgroup inside one `pl.run_scoped`, which fills a `Named` with references.
Keywords of `pl.run_scoped` would work too, but it allocates these in alphabetical order. An operand that stays for a whole tile
(attention's q) is a pipeline of one stage, whose step is the tile's number.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2
"""Warpgroups of a thread block that compute, numbers 0 and 1. The producer is number CONSUMERS."""

WGMMA_ROWS = 64
"""Rows of one wgmma, which a warpgroup computes."""

SHARED_MEMORY = 232448
"""Bytes that one block may use on compute capability 9.0: 227 KiB (CUDA C++ Programming Guide, table of technical
specifications)."""


class Registers(NamedTuple):
    """Registers per thread in each role. With 128 threads per warpgroup, they use at most the 65536 of a core."""

    producer: int
    consumer: int


MATMUL_REGISTERS = Registers(producer=40, consumer=232)
"""The experts' matmuls: their producer keeps the source rows of a gathered tile in registers."""

ATTENTION_REGISTERS = Registers(producer=24, consumer=240)
"""The attention kernels: their producer issues TMA copies only."""


def run_roles(produce: Callable[[], Any], consume: Callable[[Any], Any], registers: Registers) -> None:
    """Runs `produce()` in the producer and `consume(warpgroup)` in each consumer, each with the registers of its role."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(registers.producer, action="decrease")
        produce()

    @pl.when(warpgroup < CONSUMERS)
    def _consume():
        plgpu.set_max_registers(registers.consumer, action="increase")
        consume(warpgroup)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("full", "empty"), meta_fields=("stages", "is_ping_pong", "has_opaque_slots")
)
@dataclass(frozen=True)
class Pipeline:
    """The barriers of a ring of slots. Made by `allocate`: scratch types before `pl.run_scoped`, references inside it.

    Invariants, for the kernel to keep:
        Both roles see the same steps in the same order. A step that a consumer does not need is waited for and released too. A
        slot is released when nothing reads it any more: after `wgmma_wait`, not after `wgmma`. If ordinary loads read it, the
        race detector also needs `plgpu.commit_smem` before, because TMA writes through another proxy. The producer ends with
        `drain`.
    """

    full: tuple[Any, ...]
    """One array of barriers for each entry of `copies`: [stages], or [consumers, stages] with ping-pong."""
    empty: Any
    """[stages]."""
    stages: int
    is_ping_pong: bool
    has_opaque_slots: bool

    @classmethod
    def allocate(
        cls, stages: int, copies: int | tuple[int, ...] = 1, *, is_ping_pong: bool = False, has_opaque_slots: bool = False
    ) -> Self:
        """Returns the scratch of a pipeline.

        Args:
            copies: TMA copies that fill a slot. A tuple gives a slot several full barriers, one for each number of copies. A
                consumer can then start on the first operand while the others are in flight.
            is_ping_pong: the consumers alternate whole tiles, so a slot has one reader. A Pallas barrier must be waited for in
                every phase, or its waiter gets out of step. So each consumer has its own full barriers.
            has_opaque_slots: hides from the compiler how a slot follows from its step. Moved before the loop, the addresses of
                every wgmma of every slot would fill tens of registers.
        """
        numbers = (copies,) if isinstance(copies, int) else copies
        shape = (CONSUMERS, stages) if is_ping_pong else stages
        return cls(
            full=tuple(plgpu.Barrier(num_arrivals=number, num_barriers=shape) for number in numbers),
            empty=plgpu.Barrier(num_arrivals=1 if is_ping_pong else CONSUMERS, num_barriers=stages),
            stages=stages,
            is_ping_pong=is_ping_pong,
            has_opaque_slots=has_opaque_slots,
        )

    def slot(self, step):
        """Returns the slot of a step."""
        slot = lax.rem(step, jnp.int32(self.stages))
        return lax.optimization_barrier(slot) if self.has_opaque_slots else slot

    def acquire(self, step) -> None:
        """Producer: waits until the slot's last readers have released it. The first `stages` steps find their slots free."""

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def full_barrier(self, slot, *, group: int = 0, consumer=0):
        """Returns the barrier that the copies into a slot arrive at.

        Args:
            group: index into `copies`, if that is a tuple.
            consumer: the warpgroup that will read the slot; matters with ping-pong only.
        """
        return self.full[group].at[consumer, slot] if self.is_ping_pong else self.full[group].at[slot]

    def drain(self, steps) -> None:
        """Producer, after its last step: waits until all slots of all `steps` steps have been released.

        Without it a barrier would end with an arrival that nobody waited for. A block could exit while its shared memory is
        still in use.
        """
        for i in range(self.stages):
            self.acquire(steps + i)

    def wait(self, slot, *, group: int = 0, consumer=0) -> None:
        """Consumer: waits until the copies into a slot have landed. Arguments as in `full_barrier`."""
        plgpu.barrier_wait(self.full_barrier(slot, group=group, consumer=consumer))

    def release(self, slot) -> None:
        """Consumer: returns a slot to the producer. Called once per step by each warpgroup that reads the slot."""
        plgpu.barrier_arrive(self.empty.at[slot])
