"""The producer/consumer pipeline alone, in the interpreter or on a Hopper GPU.

Each tile sums its steps' blocks of x and y. Two stages, so that three steps wrap the ring.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.backends import compute_capability
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import launch
from moe_jax.kernels.hopper.pipeline import ATTENTION_REGISTERS, CONSUMERS, Pipeline, run_roles
from tests.helpers import races

STAGES = 2
ROWS, COLUMNS = 8, 128
STEPS_OF_TILES = [(0,), (3, 0, 4, 1)]

pytestmark = pytest.mark.skipif(
    not is_interpreted() and compute_capability() != "9.0", reason="needs a Hopper GPU or the interpreter"
)


class Scratch(NamedTuple):
    """Two operands, so that a slot is filled by two copies."""

    x: Any
    y: Any
    pipe: Pipeline


def blocks_of(rng, steps):
    return jnp.asarray(rng.integers(-9, 9, (max(steps, 1), ROWS, COLUMNS)), jnp.float32)


def sum_tiles(x, y, steps_of_tiles, copies, reads_late=False, **options):
    """[tiles, consumers, rows, columns] each tile's sum of x + 2 * y, by every consumer, or with ping-pong by one of them.

    With `reads_late`, a mistake, a consumer reads a slot once more when it has released it.
    """
    firsts = np.cumsum([0, *steps_of_tiles])
    is_ping_pong = options.get("is_ping_pong", False)

    def body(x_ref, y_ref, out_ref, scratch):
        pipe = scratch.pipe

        def produce():
            for tile, (first, end) in enumerate(zip(firsts, firsts[1:], strict=False)):

                @pl.loop(jnp.int32(first), jnp.int32(end))
                def _steps(step, consumer=tile % CONSUMERS):
                    pipe.acquire(step)
                    slot = pipe.slot(step)
                    for group, (source, buffer) in enumerate([(x_ref, scratch.x), (y_ref, scratch.y)]):
                        barrier = pipe.full_barrier(slot, group=min(group, len(pipe.full) - 1), consumer=consumer)
                        plgpu.copy_gmem_to_smem(source.at[step], buffer.at[slot], barrier)

            pipe.drain(jnp.int32(firsts[-1]))

        def consume(warpgroup):
            for tile, (first, end) in enumerate(zip(firsts, firsts[1:], strict=False)):

                def step_of(step, total):
                    slot = pipe.slot(step)
                    pipe.wait(slot, consumer=warpgroup)
                    total += scratch.x[slot]
                    if len(pipe.full) > 1:
                        pipe.wait(slot, group=1, consumer=warpgroup)
                    total += 2 * scratch.y[slot]
                    # Ordinary loads read through the generic proxy, TMA writes through the async one.
                    plgpu.commit_smem()
                    pipe.release(slot)
                    return total + 0 * scratch.y[slot] if reads_late else total

                def compute(tile=tile, first=first, end=end):
                    zero = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS)), plgpu.Layout.WG_STRIDED((ROWS, COLUMNS), vec_size=4))
                    out_ref[tile, warpgroup] = lax.fori_loop(jnp.int32(first), jnp.int32(end), step_of, zero)

                if is_ping_pong:
                    pl.when(warpgroup == tile % CONSUMERS)(compute)
                else:
                    compute()

        # One block of the grid works, so that its steps are known.
        pl.when(lax.axis_index("block") == 0)(lambda: run_roles(produce, consume, ATTENTION_REGISTERS))

    scratch = Scratch(
        plgpu.SMEM((STAGES, ROWS, COLUMNS), jnp.float32),
        plgpu.SMEM((STAGES, ROWS, COLUMNS), jnp.float32),
        Pipeline.allocate(STAGES, copies, **options),
    )
    out = jax.ShapeDtypeStruct((len(steps_of_tiles), CONSUMERS, ROWS, COLUMNS), jnp.float32)
    return launch("pipeline", body, [out], [scratch], warpgroups=CONSUMERS + 1)(x, y)[0]


def expected(x, y, steps_of_tiles):
    ends = np.cumsum(steps_of_tiles)
    summands = np.asarray(x + 2 * y)
    return np.stack([summands[end - steps : end].sum(axis=0) for steps, end in zip(steps_of_tiles, ends, strict=True)])


@pytest.mark.parametrize("copies", [2, (1, 1)], ids=["one_barrier", "two_barriers"])
@pytest.mark.parametrize("steps_of_tiles", STEPS_OF_TILES, ids=str)
def test_both_consumers_read_every_step(rng, steps_of_tiles, copies):
    x, y = (blocks_of(rng, sum(steps_of_tiles)) for _ in range(2))
    sums = np.asarray(sum_tiles(x, y, steps_of_tiles, copies))
    for consumer in range(CONSUMERS):
        np.testing.assert_array_equal(sums[:, consumer], expected(x, y, steps_of_tiles))


@pytest.mark.parametrize("steps_of_tiles", STEPS_OF_TILES, ids=str)
def test_with_ping_pong_consumers_take_tiles_in_turn(rng, steps_of_tiles):
    x, y = (blocks_of(rng, sum(steps_of_tiles)) for _ in range(2))
    sums = np.asarray(sum_tiles(x, y, steps_of_tiles, 2, is_ping_pong=True))
    tiles = np.arange(len(steps_of_tiles))
    np.testing.assert_array_equal(sums[tiles, tiles % CONSUMERS], expected(x, y, steps_of_tiles))


def test_opaque_slots_are_the_same_slots(rng):
    x, y = (blocks_of(rng, 5) for _ in range(2))
    sums = sum_tiles(x, y, (5,), 2, has_opaque_slots=True)
    np.testing.assert_array_equal(sums[:, 0], expected(x, y, (5,)))


needs_interpreter = pytest.mark.skipif(not is_interpreted(), reason="JAX's race detector needs the interpreter")


@needs_interpreter
@pytest.mark.parametrize("is_ping_pong", [False, True])
def test_no_races(rng, no_races, is_ping_pong):
    x, y = (blocks_of(rng, 8) for _ in range(2))
    jax.block_until_ready(sum_tiles(x, y, (3, 0, 4, 1), (1, 1), is_ping_pong=is_ping_pong))


@needs_interpreter
def test_race_is_found(rng):
    """A read of a slot after its release races with the copy of a later step."""
    x, y = (blocks_of(rng, 5) for _ in range(2))
    with races.search() as searches:
        sum_tiles(x, y, (5,), 2, reads_late=True)
    assert [each.races_found for each in searches] == [True]
