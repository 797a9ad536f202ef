"""`moe-jax tune`: finds the fastest tile for each pass of a layer's experts on this GPU, as entries of a tile table."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic.tile_limits import Pass, candidates
from moe_jax.kernels.experts.mosaic.tile_timing import time_tiles
from moe_jax.kernels.experts.mosaic.tiles import Entry, rule
from moe_jax.kernels.hopper.mainloop import TileShape

GAIN = 1.05
"""A tile replaces the rule's tile if that takes more than GAIN times as long. Near equals change places from run to run, and a
tile gains less in a layer than it gains alone (docs/kernels.md)."""


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer's experts."""

    hidden: int
    inter: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Timing:
    """Measured seconds of every tile, for one pass at one number of tokens."""

    pass_name: Pass
    matrix: tuple[int, int]
    layer: Layer
    tokens: int
    seconds: dict[TileShape, float]

    @property
    def rows_per_expert(self) -> float:
        """Mean number of rows an expert."""
        return self.tokens * self.layer.top_k / self.layer.experts

    @property
    def rule(self) -> TileShape:
        """The tile that is taken without a table."""
        return rule(self.pass_name, self.matrix, self.rows_per_expert)

    @property
    def best(self) -> TileShape:
        """The fastest tile if the rule's tile takes more than GAIN times as long, else the rule's tile."""
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.seconds[self.rule] > GAIN * self.seconds[fastest] else self.rule


def tune(layer: Layer, tokens: Sequence[int], dtype: str, stopwatch: Callable = time_tiles) -> Iterator[Timing]:
    """Times the six matmuls of a layer's forward and backward pass with each of their tiles at every number of tokens.

    Args:
        stopwatch: measures; has the arguments and the result of `tile_timing.time_tiles`.
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
        seconds = stopwatch(pass_name, matrix, tiles, tokens, layer.experts, layer.top_k, dtype)
        yield from (Timing(pass_name, matrix, layer, n, seconds[n]) for n in tokens)


def check(layer: Layer, tokens: Sequence[int], dtype: str) -> None:
    """Checks that such a layer can be measured here.

    Raises:
        ValueError: it cannot be measured. The message says why and what would be right.
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
    """Returns the table entry of a timing: its best tile."""
    measured = f"{jax.devices()[0].device_kind}, {datetime.date.today()}, jax {jax.__version__}"
    return Entry(timing.pass_name, timing.matrix, timing.rows_per_expert, timing.best, measured)


HEADER = f"{'pass':<26}{'matrix':>15}{'tokens':>8}{'tile':>24}{'ms':>10}{'TFLOP/s':>9}"


def rows(timing: Timing) -> Iterator[str]:
    """Yields a line for each tile, the fastest first, in the columns of HEADER."""
    flops = 2 * timing.tokens * timing.layer.top_k * timing.matrix[0] * timing.matrix[1]
    matrix = f"{timing.matrix[0]} x {timing.matrix[1]}"
    for tile, seconds in sorted(timing.seconds.items(), key=lambda item: item[1]):
        shape = f"{tile.rows} x {tile.columns} x {tile.stages}" + (" by turns" if tile.ping_pong else "")
        marks = [mark for mark, marked in (("best", timing.best), ("rule", timing.rule)) if tile == marked]
        figures = f"{1e3 * seconds:>10.4f}{flops / seconds / 1e12:>9.1f}"
        yield f"{timing.pass_name:<26}{matrix:>15}{timing.tokens:>8}{shape:>24}{figures}  {' '.join(marks)}".rstrip()
