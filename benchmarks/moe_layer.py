"""Times one whole MoE layer, forward and backward: ours on each backend, and every alternative that can be imported.

    python benchmarks/moe_layer.py                                          # Qwen3-30B-A3B's layer, every system
    python benchmarks/moe_layer.py --presets deepseek-v3 --tokens 16384 --systems mosaic sonicmoe --output layer.jsonl
    python benchmarks/moe_layer.py --systems mosaic --precision fp8         # experts in FP8
    python benchmarks/moe_layer.py --experts 8 --top-k 2 --hidden 128 --intermediate 64 --tokens 256 --dtype float32 \\
        --systems xla ragged_dot eager --check                              # on a CPU, against a reference in f64
    python benchmarks/moe_layer.py tables --tables rule packaged tiles.json # ours with several tables of tiles

The layer is router matmul, softmax, top-k and experts, with gradients to x and all weights; random data, random routing. Every
system runs in its own process on the same GPU. One second of warm-up brings the clocks down to their sustained rate. A time is
the median of `--runs` groups of `--launches` calls between two synchronisations: wall clock over calls. A group has fewer calls
if it would take more than two seconds. TFLOP/s count only the experts' matrices: 6*T*K*D*I forward, three times that with the
backward pass. The ceiling is XLA's dense matmul [T*K, D] x [D, 2I], measured the same way in the same run; "of ceiling"
compares forward + backward with it. *Kept* is the memory of the residuals, including x. *Peak* is the memory of forward +
backward besides their inputs, including gradients.

`tables`: `moe-jax tune` times each pass alone. In a layer the power limit sets the clock, and other passes decide the contents
of the L2 cache, so a tile that is faster alone may gain nothing. `packaged` is the table of a user without one, `rule` the
choice for shapes without an entry, `halved` the same without ping-pong tiles. The tables alternate in one process, `--seconds`
each, in forward and reverse order, after a second of warm-up. A time is the median of the rounds, and so is the difference from
the first table in the same round.
"""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, in_a_process, main, one_of, reason
from moe_layer_peers import IN_TORCH, PEERS, Layer, build, passes_in_jax, random_in_jax

from moe_jax.config import EXPERT_LAYERS, ExpertLayer
from moe_jax.kernels.backends import BACKENDS
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic.tiles import ENVIRONMENT_VARIABLE, choose_tile, rule, shared_tile

CEILING = "dense matmul"
WARM_UP_SECONDS = 1.0
GROUP_SECONDS = 2.0
CHOICES = {"packaged": choose_tile, "rule": rule, "halved": shared_tile}


@dataclass(kw_only=True)
class Systems(Case):
    """A row for each preset, number of tokens and system."""

    presets: tuple[one_of(EXPERT_LAYERS), ...] = ("qwen3-30b-a3b",)  # sizes of published layers; all are routed alike
    tokens: tuple[int, ...] = (1024, 8192, 32768)
    systems: tuple[one_of((CEILING, *BACKENDS, *PEERS)), ...] = (*BACKENDS, *PEERS)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    precision: Literal["bf16", "fp8", "fp8_kept"] = "bf16"  # of our own backends; FP8 copies are made before
    runs: int = 5  # groups of launches
    launches: int = 20  # calls in a group
    check: bool = False  # compare y and gradients with f64: small layers, float32
    seed: int = field(default_factory=lambda: time.time_ns() % 2**31)  # default: a new seed for each run
    timeout: int = 3600  # seconds for one system on one preset: SonicMoE tunes long
    experts: int | None = None  # replaces the preset's size
    top_k: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    here: bool = False  # measure in this process, for one system

    SMALL = dict(experts=8, top_k=2, hidden=128, intermediate=64, tokens=(64,), dtype="float32", systems=("xla", "ragged_dot"),
                 runs=1, launches=1, check=True)  # fmt: skip
    COLUMNS = ("preset", "tokens", "system", "fwd_ms", "fwd_bwd_ms", "fwd_tflops", "fwd_bwd_tflops", "of_ceiling", "kept_mib",
               "peak_mib")  # fmt: skip
    HAS_CHILDREN = True

    def results(self):
        """Yields the rows, the ceiling first."""
        for preset in self.presets:
            sizes = EXPERT_LAYERS[preset]
            own = dict(experts=self.experts, top_k=self.top_k, hidden=self.hidden, inter=self.intermediate)
            sizes = sizes._replace(**{name: size for name, size in own.items() if size is not None})
            ceilings: dict[int, float] = {}
            for system in self.systems if self.here else dict.fromkeys((CEILING, *self.systems)):
                if self.here:
                    yield from (measure(preset, system, sizes, tokens, self) for tokens in self.tokens)
                    continue
                for row in self.rows_of_child(preset, system):
                    if system == CEILING:
                        ceilings[row["tokens"]] = row.get("fwd_tflops")
                    elif ceilings.get(row["tokens"]) and "fwd_bwd_tflops" in row:
                        row["of_ceiling"] = row["fwd_bwd_tflops"] / ceilings[row["tokens"]]
                    yield row

    def rows_of_child(self, preset: str, system: str) -> list[dict]:
        """Returns the rows of one system on one preset; a row with a note for what was not measured."""
        # In a torch process JAX runs on the CPU: else it would allocate most GPU memory when the reference first runs.
        variables = {"JAX_PLATFORMS": "cpu"} if system in IN_TORCH else {}
        alone = replace(self, presets=(preset,), systems=(system,), here=True)
        rows, problem = in_a_process(__file__, "systems", alone, timeout=self.timeout, **variables)
        lost = [tokens for tokens in self.tokens if tokens not in {row["tokens"] for row in rows}]
        return rows + [{"preset": preset, "tokens": tokens, "system": system, "note": problem} for tokens in lost]


def measure(preset: str, system: str, sizes: ExpertLayer, tokens: int, options: Systems) -> dict:
    """Returns one system's row at one number of tokens, with a note for everything that could not be measured."""
    row: dict = {"preset": preset, "tokens": tokens, "system": system}
    flops = 6 * tokens * sizes.top_k * sizes.hidden * sizes.inter
    try:
        if system == CEILING:
            return row | measure_ceiling(sizes, tokens, options)
        layer = build(system, sizes, tokens, options.dtype, options.seed, options.precision)
    except ImportError as error:
        return row | {"note": f"cannot be imported: {error}"[:120]}
    except Exception as error:  # One system's failure is a row, not the end of the others.
        return row | {"note": reason(error)}
    row["device"] = layer.device
    stages = [
        lambda: timed("fwd", layer.forward, layer.wait, flops, options),
        layer.memory,
        lambda: timed("fwd_bwd", layer.step, layer.wait, 3 * flops, options),
    ]
    if layer.round_weights is not None:
        # Once a step, for all micro-batches: no part of the other times.
        stages.append(lambda: {"round_weights_ms": median_ms(layer.round_weights, layer.wait, options)[0]})
    if options.check:
        stages.append(lambda: {"differences": differences(layer, sizes.top_k)})
    notes = []
    for stage in stages:
        try:
            row |= stage()
        except Exception as error:
            notes.append(reason(error))
    if "round_weights_ms" in row:
        notes.append(f"{options.precision}, rounding the weights: {row['round_weights_ms']:.3f} ms a step")
    if "differences" in row:
        notes.append("from f64: " + ", ".join(f"{name} {value:.1e}" for name, value in row["differences"].items()))
    return row | {"note": "; ".join(dict.fromkeys(notes))}


def measure_ceiling(sizes: ExpertLayer, tokens: int, options: Systems) -> dict:
    """Times a dense matmul: its rows are the choices of all tokens, its matrix is one expert's gate-up."""
    one = sizes._replace(experts=1)
    x, _, w_gate_up, *_ = random_in_jax(one, tokens * sizes.top_k, options.dtype, options.seed, transposed=True)
    w, device = w_gate_up[0], jax.devices()[0].device_kind
    matmul = jax.jit(jnp.matmul).lower(x, w).compile()
    flops = 4 * tokens * sizes.top_k * sizes.hidden * sizes.inter
    return timed("fwd", lambda: matmul(x, w), jax.block_until_ready, flops, options) | {"device": device, "note": device}


def timed(name: str, start: Callable, wait: Callable, flops: float, options: Systems) -> dict:
    """Returns the milliseconds of one call, TFLOP/s, and the number of calls in a group."""
    ms, launches = median_ms(start, wait, options)
    return {f"{name}_ms": ms, f"{name}_tflops": flops / ms / 1e9, f"{name}_launches": launches}


def median_ms(start: Callable, wait: Callable, options: Systems) -> tuple[float, int]:
    """Returns the milliseconds of one call, and the number of calls in a group."""
    wait(start())  # Compiles and tunes.
    began, calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < WARM_UP_SECONDS or calls == 0:
        wait(start())
        calls += 1
    launches = max(1, min(options.launches, int(GROUP_SECONDS * calls / seconds)))
    groups = []
    for _ in range(options.runs):
        result = None
        began = time.perf_counter()
        for _ in range(launches):
            # Else the gradients of two calls would be in memory at once.
            del result
            result = start()
        wait(result)
        groups.append((time.perf_counter() - began) / launches)
    return 1e3 * statistics.median(groups), launches


def differences(layer: Layer, k: int) -> dict[str, float]:
    """Returns |a - b| / |b| of y and of each gradient; b is the layer in plain jnp and f64, with every expert on every token.

    In bfloat16 differences mean little: if two experts' scores are nearly equal, a rounded logit may choose the other expert.
    """

    def wide(a) -> np.ndarray:
        return np.asarray(a.detach().cpu().double() if hasattr(a, "detach") else a, np.float64)

    def reference(x, router, w_gate_up, w_down):
        probabilities = jax.nn.softmax(x @ router.T)
        weights = jnp.where(probabilities >= jax.lax.top_k(probabilities, k)[0][:, -1:], probabilities, 0)
        gate, up = jnp.split(jnp.einsum("eid,td->eti", w_gate_up, x), 2, axis=2)
        y = jnp.einsum("edi,eti->etd", w_down, jax.nn.silu(gate) * up)
        return jnp.einsum("te,etd->td", weights / weights.sum(axis=1, keepdims=True), y)

    x, *weights, dy = layer.inputs
    y, dx, *gradients = layer.step()
    found = [wide(a) for a in (y, dx, *layer.to_common(*gradients))]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected, backward = jax.vjp(reference, *(wide(a) for a in (x, *layer.to_common(*weights))))
        expected = [np.asarray(a) for a in (expected, *backward(jnp.asarray(wide(dy))))]
    names = ("y", "dx", "drouter", "dw_gate_up", "dw_down")
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, a, b in zip(names, found, expected, strict=True)}


@dataclass(kw_only=True)
class Tables(Case):
    """A row for each preset, number of tokens and table of tiles."""

    presets: tuple[one_of(EXPERT_LAYERS), ...] = ("qwen3-30b-a3b",)
    tokens: tuple[int, ...] = (8192, 32768)
    tables: tuple[str, ...] = ("rule", "packaged")  # rule, halved, packaged or files of `moe-jax tune`
    rounds: int = 5
    seconds: float = 0.5  # seconds of one table in one round
    backend: one_of(BACKENDS) = "mosaic"  # others ignore the tables

    SMALL = dict(tokens=(16,), rounds=1, seconds=0.0, backend="xla")

    def results(self):
        """Yields the milliseconds with each table, and the relative difference from the first table."""
        for preset in self.presets:
            sizes = ExpertLayer(128, 64, 8, 2) if self.small else EXPERT_LAYERS[preset]
            for tokens in self.tokens:
                inputs = random_in_jax(sizes, tokens, "bfloat16", time.time_ns() % 2**31)
                for table, (ms, difference) in self.compare(sizes.top_k, inputs).items():
                    yield dict(preset=preset, tokens=tokens, table=table, fwd_bwd_ms=ms, difference=difference)

    def compare(self, top_k: int, inputs: tuple) -> dict[str, tuple[float, float]]:
        """Returns the milliseconds with each table, and the relative difference from the first one."""
        lowered = [self.lower(table, top_k, inputs) for table in self.tables]
        with ThreadPoolExecutor() as pool:
            programs = list(pool.map(lambda program: program.compile(), lowered))
        seconds_of_call(programs[0], inputs, 0.0 if self.small else WARM_UP_SECONDS)
        times: dict[str, list[float]] = {table: [] for table in self.tables}
        for number in range(self.rounds):
            turns = list(zip(self.tables, programs, strict=True))
            for table, program in turns if number % 2 == 0 else reversed(turns):
                times[table].append(seconds_of_call(program, inputs, self.seconds))
        first, median = times[self.tables[0]], statistics.median
        return {
            table: (1e3 * median(own), median(a / b - 1 for a, b in zip(own, first, strict=True)))
            for table, own in times.items()
        }

    def lower(self, table: str, top_k: int, inputs: tuple) -> jax.stages.Lowered:
        """Lowers the layer with a table's tiles, which are chosen while JAX traces it."""
        os.environ[ENVIRONMENT_VARIABLE] = "" if table in CHOICES else table
        mosaic.choose_tile = CHOICES.get(table, choose_tile)
        jax.clear_caches()
        return jax.jit(passes_in_jax(self.backend, top_k)[1]).lower(*inputs)


def seconds_of_call(program: jax.stages.Compiled, inputs: tuple, at_least: float) -> float:
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


CASES = {"systems": Systems, "tables": Tables}

if __name__ == "__main__":
    main(__doc__, CASES)
