"""`moe-jax tune`: finds the fastest tile for each pass of a layer's experts on this GPU, as entries of a tile table.

Each tile is compiled once, for the largest number of tokens. For smaller numbers, the plans' other tokens choose no expert.
"""

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic import ROW_ALIGNMENT
from moe_jax.kernels.experts.mosaic.by_experts import OuterOperands, outer
from moe_jax.kernels.experts.mosaic.by_rows import RowsOperands, matmul, matmul_gated
from moe_jax.kernels.experts.mosaic.by_rows_backward import matmul_gated_backward
from moe_jax.kernels.experts.mosaic.tile_limits import Pass, candidates
from moe_jax.kernels.experts.mosaic.tiles import Entry, rule
from moe_jax.kernels.experts.routing import Plan, plan
from moe_jax.kernels.hopper.mainloop import TileShape

GAIN = 1.05
"""A tile replaces the rule's tile if that takes more than GAIN times as long. Nearly equal tiles swap ranks from run to run,
and a tile gains less in a layer than in isolation (docs/kernels.md)."""


@dataclass(frozen=True)
class Layer:
    """The sizes of an MoE layer to tune for."""

    hidden: int
    inter: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Timing:
    """Measured seconds of each tile, for one pass and number of tokens."""

    pass_name: Pass
    matrix: tuple[int, int]
    layer: Layer
    tokens: int
    seconds: dict[TileShape, float]

    @property
    def rows_per_expert(self) -> float:
        """Mean number of rows per expert."""
        return self.tokens * self.layer.top_k / self.layer.experts

    @property
    def rule(self) -> TileShape:
        """The tile that would be used without a table."""
        return rule(self.pass_name, self.matrix, self.rows_per_expert)

    @property
    def best(self) -> TileShape:
        """The fastest tile if it beats the default by more than GAIN, else the default tile."""
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.seconds[self.rule] > GAIN * self.seconds[fastest] else self.rule


def tune(layer: Layer, tokens: Sequence[int], dtype: str, stopwatch: Callable | None = None) -> Iterator[Timing]:
    """Measures every candidate tile of the six matmuls in a layer's forward and backward pass.

    Args:
        stopwatch: the function that measures, like the default `time_tiles`.
    """
    gate_up, down = (2 * layer.inter, layer.hidden), (layer.hidden, layer.inter)
    passes: list[tuple[Pass, tuple[int, int]]] = [
        ("gated_matmul", gate_up),
        ("grouped_matmul", down),
        ("gated_matmul_backward", down),
        ("grouped_outer", down),
        ("grouped_matmul_transposed", gate_up),
        ("grouped_outer", gate_up),
    ]
    for pass_name, matrix in passes:
        rules = [rule(pass_name, matrix, n * layer.top_k / layer.experts) for n in tokens]
        tiles = list(dict.fromkeys(candidates(pass_name, matrix) + rules))
        seconds = (stopwatch or time_tiles)(pass_name, matrix, tiles, tokens, layer.experts, layer.top_k, dtype)
        yield from (Timing(pass_name, matrix, layer, n, seconds[n]) for n in tokens)


def check(layer: Layer, tokens: Sequence[int], dtype: str) -> None:
    """Checks that such a layer can be measured here.

    Raises:
        ValueError: it cannot be measured. The message gives the reason and a remedy.
    """
    if not tokens:
        raise ValueError("give at least one number of tokens")
    for name, size in [*asdict(layer).items(), *(("tokens", n) for n in tokens)]:
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
    if layer.top_k > layer.experts:
        raise ValueError(f"top_k is {layer.top_k}; it must be at most the number of experts, {layer.experts}")
    reason = mosaic.refusal(jnp.dtype(dtype), layer.hidden, layer.inter)
    if reason is None and not mosaic.is_native():
        reason = f"it needs a Hopper GPU (compute capability 9.0); this is {jax.devices()[0].device_kind}"
    if reason is not None:
        raise ValueError(f"tune measures the kernels of backend 'mosaic': {reason}")


def entry(timing: Timing) -> Entry:
    """Returns the tile table entry with a timing's best tile."""
    measured = f"{jax.devices()[0].device_kind}, {datetime.date.today()}, jax {jax.__version__}"
    return Entry(timing.pass_name, timing.matrix, timing.rows_per_expert, timing.best, measured)


HEADER = f"{'pass':<26}{'matrix':>15}{'tokens':>8}{'tile':>24}{'ms':>10}{'TFLOP/s':>9}"


def rows(timing: Timing) -> Iterator[str]:
    """Yields a line of text per tile, fastest first, in the columns of HEADER."""
    flops = 2 * timing.tokens * timing.layer.top_k * timing.matrix[0] * timing.matrix[1]
    matrix = f"{timing.matrix[0]} x {timing.matrix[1]}"
    for tile, seconds in sorted(timing.seconds.items(), key=lambda item: item[1]):
        shape = f"{tile.rows} x {tile.columns} x {tile.stages}" + (" by turns" if tile.ping_pong else "")
        marks = [mark for mark, marked in (("best", timing.best), ("rule", timing.rule)) if tile == marked]
        figures = f"{1e3 * seconds:>10.4f}{flops / seconds / 1e12:>9.1f}"
        yield f"{timing.pass_name:<26}{matrix:>15}{timing.tokens:>8}{shape:>24}{figures}  {' '.join(marks)}".rstrip()


GROUPS, GROUP_SECONDS, MOST_CALLS = 5, 50e-3, 100
"""A time is the median over GROUPS groups of calls. A group has at most MOST_CALLS calls and lasts about GROUP_SECONDS:
long enough for the power limit to set the clock, as in a layer. A tile that is 15 % faster for 5 ms may gain nothing there."""

ROUTINGS = 4
"""Random routings; a call launches the pass once for each. With one routing the L2 cache would hold a single token's experts,
and Python's call would take longer than the GPU's work."""


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

    The tiles alternate group by group, so that a warming GPU slows all of them equally.
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
    """Runs one pass with a given tile, on operands in the order of `operand_shapes`."""
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
    """Returns the pass over several plans, jitted. It returns one number per result: no result outlives its launch."""
    run = jax.jit(partial(run_pass, pass_name, tile))
    return jax.jit(lambda plans, *operands: [jax.tree.map(lambda a: a[(0,) * a.ndim], run(plan, *operands)) for plan in plans])


def _seconds(program: Callable, plans: list[Plan], operands: list[Array], calls: int) -> float:
    """Measures one launch of the pass, as the mean over `calls` calls."""
    began = time.perf_counter()
    for _ in range(calls):
        result = program(plans, *operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / (calls * ROUTINGS)
