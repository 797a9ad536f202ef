"""The compiled programs of the steps' shapes.

A GPU replays a step as a CUDA graph. Changing a graph's addresses costs the host 1 to 2 ms. So a step without chunks overwrites
the results of the previous step of its shape.

A step's temporaries are allocated in each step, at the previous step's addresses. Between two steps small arrays may occupy
part of that memory. Then XLA changes an address in each kernel of the graph: for 540 kernels the host needs 1.2 to 2.3 ms.
XLA's default allocator places an array in the smallest free gap that fits. So `leave_gaps` leaves gaps for small arrays.
"""

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Int

from moe_jax.serving.drafts import module_program
from moe_jax.serving.placement import ROWS, on_each, rows_like
from moe_jax.serving.step import DeviceState, StepOutput, StepShape, empty_rows, output_like, packed, step
from moe_jax.serving.weights import ServedModel

_logger = logging.getLogger(__name__)


StepProgram = tuple[Compiled, StepOutput | None]
"""A step shape's program, and the results of its last step, which the next one writes over; None if it allocates new arrays."""


class OnDemand[Program](dict[StepShape, Program]):
    """The programs of an engine that compiles each one when a step first needs it.

    Args:
      make: `step_programs` or `module_programs`.
      arguments: its arguments without the shapes.
    """

    def __init__(self, make: Callable[..., dict[StepShape, Program]], *arguments: Any):
        super().__init__()
        # Only shapes: the arrays would outlive an update of the weights, and steps donate the state.
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) if isinstance(a, Array) else a, arguments
        )
        self._make = lambda shape: make(*like, [shape])[shape]

    def __missing__(self, shape: StepShape) -> Program:
        self[shape] = self._make(shape)
        return self[shape]


def step_programs(
    served: ServedModel, weights_tree: Any, weights: list[Array], state: DeviceState, shapes: Sequence[StepShape]
) -> dict[StepShape, StepProgram]:
    """Compiles the programs of these shapes, many at a time.

    Args:
      weights: the leaves of the tree `weights_tree`. As with `state`, only shapes and devices are read.
    """
    tree = jax.tree.unflatten(weights_tree, weights)
    mesh, shardings = served.mesh, [leaf.sharding for leaf in weights]
    in_specs = [sharding.spec for sharding in shardings if isinstance(sharding, NamedSharding)], ROWS, ROWS, ROWS

    def output_of_all(shape: StepShape) -> StepOutput:
        return jax.tree.map(lambda array: rows_like(array, mesh), output_like(served, tree, shape))

    def lower(shape: StepShape) -> Lowered:
        def of_leaves(leaves: list[Array], state: DeviceState, upload: Int[Array, "_"], output: StepOutput | None):
            return step(served, shape, jax.tree.unflatten(weights_tree, leaves), state, upload)

        # JAX would drop an unused argument, and its memory could not be reused for results.
        program = jax.jit(on_each(mesh, of_leaves, in_specs), donate_argnums=(1, 3), keep_unused=True)
        output = output_of_all(shape) if _writes_over(shape) else None
        return program.lower(weights, state, rows_like(packed([empty_rows(shape)]), mesh), output)

    def compiled(shape: StepShape, lowered: Lowered) -> StepProgram:
        output = _zeros(output_of_all(shape), state.last_token.sharding) if _writes_over(shape) else None
        return lowered.compile(), output

    return _at_once(shapes, lower, compiled)


def module_programs(
    served: ServedModel, weights_tree: Any, weights: list[Array], state: DeviceState, shapes: Sequence[StepShape]
) -> dict[StepShape, Compiled]:
    """Compiles `drafts.module_program` for these shapes; arguments as in `step_programs`."""

    def lower(shape: StepShape) -> Lowered:
        upload = packed([empty_rows(shape)])
        of_step = lambda *arrays: step(served, shape, jax.tree.unflatten(weights_tree, arrays[0]), *arrays[1:])  # noqa: E731
        _, output = jax.eval_shape(of_step, weights, state, upload)
        tokens = np.zeros(shape.decodes + shape.chunks, np.int32), np.zeros(shape.decodes, np.int32)
        checked = *tokens, np.zeros((2, shape.decodes), np.int32)
        program = module_program(served, weights_tree, shape)
        return program.lower(weights, state.drafting, output._replace(logits=None), checked, upload)

    return _at_once(shapes, lower, lambda _, lowered: lowered.compile())


def _at_once[Program](
    shapes: Sequence[StepShape],
    lower: Callable[[StepShape], Lowered],
    compiled: Callable[[StepShape, Lowered], Program],
) -> dict[StepShape, Program]:
    """Returns the program of each shape. Shapes are lowered one by one while earlier ones compile in parallel.

    Programs with chunks compile longest, so they are lowered first.
    """
    began, numbers = perf_counter(), itertools.count(1)

    def compiled_and_told(shape: StepShape, lowered: Lowered) -> Program:
        program = compiled(shape, lowered)
        rows = f"{shape.decodes} decoding rows, {shape.chunk_tokens} tokens of prompts"
        _logger.info("compiled program %d of %d (%s), %.1f s", next(numbers), len(shapes), rows, perf_counter() - began)
        return program

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        try:
            longest_first = sorted(shapes, key=lambda shape: shape.chunk_tokens, reverse=True)
            programs = {shape: pool.submit(compiled_and_told, shape, lower(shape)) for shape in longest_first}
            return {shape: programs[shape].result() for shape in shapes}
        except BaseException:
            # Else the error would wait for all remaining compilations.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _writes_over(shape: StepShape) -> bool:
    """Returns True for a step that overwrites earlier results. Steps with chunks hide the time of their launch."""
    return not shape.chunks and not shape.drafts


def _zeros(like: StepOutput, sharding: Sharding) -> StepOutput:
    # Compiled, so that each array has its own memory: the same zeros twice could not be donated.
    return jax.jit(lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), like), out_shardings=sharding)()


GAP_BYTES = tuple(256 << i for i in range(9))
"""256 bytes to 64 KiB. XLA's allocator rounds sizes up to multiples of 256."""

GAPS_OF_A_SIZE = 24
"""More than the number of arrays of one size that steps in flight use."""


def leave_gaps(device: jax.Device) -> list[Array]:
    """Returns small arrays on a GPU with gaps between them; none on other devices. The gaps last as long as the arrays.

    Later arrays that the process keeps may fill them.
    """
    if device.platform != "gpu":
        return []
    gaps: list[Array] = []
    borders: list[Array] = []
    for num_bytes in GAP_BYTES:
        for _ in range(GAPS_OF_A_SIZE):
            # A border has its gap's size. A smaller one might be placed in a hole elsewhere, and two gaps would merge.
            for arrays in (gaps, borders):
                arrays.append(jax.device_put(np.zeros(num_bytes, np.uint8), device))
    # All must be allocated before the first gap is freed.
    jax.block_until_ready((gaps, borders))
    return borders
