"""Measures how long one pass over the experts takes on this GPU with each of several tiles.

Each tile is compiled once, for the largest number of tokens. Smaller numbers are plans in which the other tokens choose nobody.
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
from moe_jax.kernels.experts.mosaic.by_experts import OuterOperands, outer
from moe_jax.kernels.experts.mosaic.by_rows import RowsOperands, matmul, matmul_gated
from moe_jax.kernels.experts.mosaic.by_rows_backward import matmul_gated_backward
from moe_jax.kernels.experts.mosaic.tile_limits import Pass
from moe_jax.kernels.experts.routing import Plan, plan
from moe_jax.kernels.hopper.mainloop import TileShape

GROUPS, GROUP_SECONDS, MOST_CALLS = 5, 50e-3, 100
"""A time is the median over GROUPS groups of calls. A group has at most MOST_CALLS calls and lasts about GROUP_SECONDS:
long enough for the power limit to set the clock, as in a layer. A tile that is 15 % faster for 5 ms may gain nothing there."""

ROUTINGS = 4
"""Random routings; a call launches the pass once for each. With one routing the L2 cache would hold a single token's experts,
and Python would take longer to call than the GPU to compute."""


def time_tiles(
    pass_name: Pass,
    matrix: tuple[int, int],
    tiles: Sequence[TileShape],
    tokens: Sequence[int],
    experts: int,
    top_k: int,
    dtype: str,
) -> dict[int, dict[TileShape, float]]:
    """Returns the seconds of one launch by tokens and tile, with random data. Each token chooses `top_k` of `experts` evenly.

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


def run_pass(pass_name: Pass, tile: TileShape, plan: Plan, *operands: Array) -> Array | tuple[Array | None, ...]:
    """Runs one pass with a given tile, on operands as `operand_shapes` lists them."""
    rows, other, *more = operands
    match pass_name:
        case "gated_matmul":
            return matmul_gated(RowsOperands(rows, other), plan, tile, keep_h=True)
        case "gated_matmul_backward":
            h, weight_of_row = more
            return matmul_gated_backward(rows, other, h, weight_of_row, plan, tile)
        case "grouped_outer":
            return outer([OuterOperands(rows, other, plan)], tile, rows.dtype)
        case _:
            return matmul(rows, other, plan, tile, transpose=pass_name == "grouped_matmul_transposed")


def operand_shapes(pass_name: Pass, matrix: tuple[int, int], num_rows: int, experts: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the rows, then of their counterpart: the experts' matrices, or other rows.

    The backward pass also takes h and row weights.
    """
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


def _program(pass_name: Pass, tile: TileShape):
    """Returns the pass over several plans, jitted. It returns one number of each result: no result outlives its launch."""
    run = jax.jit(partial(run_pass, pass_name, tile))
    return jax.jit(lambda plans, *operands: [jax.tree.map(lambda a: a[(0,) * a.ndim], run(plan, *operands)) for plan in plans])


def _seconds(program: Callable, plans: list[Plan], operands: list[Array], calls: int) -> float:
    """Measures one launch of the pass, as the mean over `calls` calls."""
    began = time.perf_counter()
    for _ in range(calls):
        result = program(plans, *operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / (calls * ROUTINGS)
