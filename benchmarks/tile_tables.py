"""Times a whole MoE layer with several tile tables, alternating in one process: the gain of a table in a layer.

    python benchmarks/tile_tables.py --presets qwen3-30b-a3b --tokens 8192 32768 --tables rule packaged tiles.json
    python benchmarks/tile_tables.py --presets deepseek-v3 --tokens 16384 --tables halved rule packaged

`moe-jax tune` times each pass alone. In a layer the power limit sets the clock, and other passes decide the contents of the L2
cache. A tile that is faster alone may gain nothing. `packaged` is the table of a user without one. `rule` is the choice for
shapes without an entry, and `halved` is the same without ping-pong tiles. Timed is forward + backward of `moe_layer.py`'s
layer. The tables alternate, `--seconds` each, in forward and reverse order, after a second of warm-up. A time is the median of
the rounds, and so is the difference from the first table in the same round.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
from moe_layer import PRESETS
from moe_layer_peers import passes_in_jax, random_in_jax

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic.tiles import ENVIRONMENT_VARIABLE, choose_tile, rule, shared_tile

WARM_UP_SECONDS = 1.0
CHOICES = {"packaged": choose_tile, "rule": rule, "halved": shared_tile}


def main() -> None:
    """Prints a row for each preset, number of tokens and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument(
        "--tables", nargs="+", default=["rule", "packaged"], help="rule, halved, packaged or files of `moe-jax tune`"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of one table in one round")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16")
    print(f"{'layer':>18}{'tokens':>8}{'fwd+bwd ms':>12}{'difference':>12}  table")
    for preset in args.presets:
        for tokens in args.tokens:
            for table, (ms, difference) in compare(preset, tokens, args).items():
                print(f"{preset:>18}{tokens:>8}{ms:>12.3f}{difference:>+12.1%}  {table}", flush=True)


def compare(preset: str, tokens: int, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Returns the milliseconds with each table, and the relative difference from the first table."""
    shape = PRESETS[preset]
    inputs = random_in_jax(shape, tokens, "bfloat16", time.time_ns() % 2**31)
    lowered = [lower(table, shape.k, inputs) for table in args.tables]
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda program: program.compile(), lowered))
    seconds(programs[0], inputs, WARM_UP_SECONDS)
    times = {table: [] for table in args.tables}
    for number in range(args.rounds):
        turns = list(zip(args.tables, programs, strict=True))
        for table, program in turns if number % 2 == 0 else reversed(turns):
            times[table].append(seconds(program, inputs, args.seconds))
    first = times[args.tables[0]]
    return {
        table: (
            1e3 * statistics.median(own),
            statistics.median(a / b - 1 for a, b in zip(own, first, strict=True)),
        )
        for table, own in times.items()
    }


def lower(table: str, k: int, inputs: tuple) -> jax.stages.Lowered:
    """Lowers the layer with a table's tiles, which are chosen while JAX traces it."""
    os.environ[ENVIRONMENT_VARIABLE] = "" if table in CHOICES else table
    mosaic.choose_tile = CHOICES.get(table, choose_tile)
    jax.clear_caches()
    return jax.jit(passes_in_jax("mosaic", k)[1]).lower(*inputs)


def seconds(program: jax.stages.Compiled, inputs: tuple, at_least: float) -> float:
    """Returns the seconds of one call, averaged over calls that take `at_least` seconds together."""
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < at_least or calls == 0:
        results = None
        for _ in range(3):
            # Else the gradients of two calls would be in memory at once.
            del results
            results = program(*inputs)
            calls += 1
        jax.block_until_ready(results)
    return passed / calls


if __name__ == "__main__":
    main()
