"""How long one pass over the experts takes on this GPU with each of several tiles.

Every tile is compiled once, for the most tokens asked for; fewer tokens are plans in which the others choose nobody.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_jax.kernels.experts.mosaic import ROW_ALIGNMENT
from moe_jax.kernels.experts.mosaic.by_experts import Part, outer
from moe_jax.kernels.experts.mosaic.by_rows import matmul, matmul_gated_silu
from moe_jax.kernels.experts.mosaic.by_rows_backward import matmul_gated_silu_backward
from moe_jax.kernels.experts.mosaic.tile_limits import Pass
from moe_jax.kernels.experts.routing import Plan, plan
from moe_jax.kernels.hopper.mainloop import Tile

GROUPS, GROUP_SECONDS, MOST_CALLS = 5, 50e-3, 100
"""A time is the median of so many groups of calls, each of at most so many, and of about so many seconds: long enough for the
power limit to set the clock, as it does in a layer. A tile that is 15 % faster for 5 ms may gain nothing there."""

ROUTINGS = 4
"""A call launches the pass once for each of so many random routings. With one alone a single token's experts would be read
from the L2 cache, and Python would take longer to call than the GPU to compute."""


def time_tiles(
    pass_name: Pass,
    matrix: tuple[int, int],
    tiles: Sequence[Tile],
    tokens: Sequence[int],
    experts: int,
    top_k: int,
    dtype: str,
) -> dict[int, dict[Tile, float]]:
    """Seconds of one launch by tokens and tile, with random data, each token choosing `top_k` of `experts` evenly.

    The tiles take turns group by group, so that a GPU that grows warm slows all of them.
    """
    most = max(tokens)
    routings = {n: [_routing(jax.random.key(seed), n, most, experts, top_k) for seed in range(ROUTINGS)] for n in tokens}
    operands = _operands(pass_name, matrix, routings[most][0], dtype)
    programs = [_program(pass_name, tile) for tile in tiles]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda program: program.lower(routings[most], *operands).compile(), programs))

    results = {}
    for n, plans in routings.items():
        warm_up = [_seconds(program, plans, operands, calls=1) for program in 2 * compiled]
        calls = max(1, min(MOST_CALLS, round(GROUP_SECONDS / (min(warm_up) * ROUTINGS))))
        groups = [[_seconds(program, plans, operands, calls) for program in compiled] for _ in range(GROUPS)]
        results[n] = {tile: statistics.median(times) for tile, *times in zip(tiles, *groups, strict=True)}
    return results


def run_pass(pass_name: Pass, tile: Tile, plan: Plan, *operands: Array) -> Array | tuple[Array | None, ...]:
    """One pass with a tile of one's choice, on operands as `operand_shapes` lists them."""
    rows, other, *more = operands
    match pass_name:
        case "gated_matmul":
            return matmul_gated_silu(rows, other, plan, tile, keep_h=True)
        case "gated_matmul_backward":
            h, weight_of_row = more
            return matmul_gated_silu_backward(rows, other, h, weight_of_row, plan, tile)
        case "grouped_outer":
            return outer([Part(rows, other, plan)], tile, rows.dtype)
        case _:
            return matmul(rows, other, plan, tile, transpose=pass_name == "grouped_matmul_transposed")


def operand_shapes(pass_name: Pass, matrix: tuple[int, int], num_rows: int, experts: int) -> list[tuple[int, ...]]:
    """Rows, then what meets them: the experts' matrices, or other rows. The backward pass also takes h and row weights."""
    match pass_name:
        case "gated_matmul" | "grouped_matmul":
            return [(num_rows, matrix[1]), (experts, *matrix)]
        case "grouped_matmul_transposed":
            return [(num_rows, matrix[0]), (experts, *matrix)]
        case "gated_matmul_backward":
            return [(num_rows, matrix[0]), (experts, *matrix), (num_rows, 2 * matrix[1]), (num_rows,)]
        case _:
            return [(num_rows, matrix[0]), (num_rows, matrix[1])]


@partial(jax.jit, static_argnames=("most", "experts", "top_k"))
def _routing(key: Array, tokens: int | Array, most: int, experts: int, top_k: int) -> Plan:
    chosen = jax.lax.top_k(jax.random.uniform(key, (most, experts)), top_k)[1]
    return plan(jnp.where(jnp.arange(most)[:, None] < tokens, chosen, experts), experts, ROW_ALIGNMENT)


def _operands(pass_name: Pass, matrix: tuple[int, int], plan: Plan, dtype: str) -> list[Array]:
    shapes = operand_shapes(pass_name, matrix, plan.num_rows, plan.num_experts)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [draw(jax.random.key(i), shape, dtype if len(shape) > 1 else "float32") for i, shape in enumerate(shapes)]


def _program(pass_name: Pass, tile: Tile):
    """The pass with each of several plans. It returns one number of each result, so that no result outlives its launch."""
    run = jax.jit(partial(run_pass, pass_name, tile))
    return jax.jit(lambda plans, *operands: [jax.tree.map(lambda a: a[(0,) * a.ndim], run(plan, *operands)) for plan in plans])


def _seconds(program: Callable, plans: list[Plan], operands: list[Array], calls: int) -> float:
    """Of one launch of the pass."""
    began = time.perf_counter()
    for _ in range(calls):
        result = program(plans, *operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / (calls * ROUTINGS)
