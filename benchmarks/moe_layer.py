"""Times one whole MoE layer, forward and backward: ours on each backend, and every alternative that can be imported.

    python benchmarks/moe_layer.py                                          # Qwen3-30B-A3B's layer, every system
    python benchmarks/moe_layer.py --presets deepseek-v3 --tokens 16384 --systems mosaic sonicmoe --output results/
    python benchmarks/moe_layer.py --backends mosaic --precision fp8        # experts in FP8, peers in bf16
    python benchmarks/moe_layer.py --experts 8 --top-k 2 --hidden 128 --intermediate 64 --tokens 256 --dtype float32 \\
        --systems xla ragged_dot eager --check                              # on a CPU, against a reference in f64

The layer is router matmul, softmax, top-k and experts, with gradients to x and all weights; random data, random routing. Every
system runs in its own process on the same GPU. One second of warm-up brings the clocks down to their sustained rate. A time is
the median of `--runs` groups of `--launches` calls between two synchronisations: wall clock over calls. A group has fewer calls
if it would take more than two seconds. TFLOP/s count only the experts' matrices: 6*T*K*D*I forward, three times that with the
backward pass. The ceiling is XLA's dense matmul [T*K, D] x [D, 2I], measured the same way in the same run; "of ceiling"
compares forward + backward with it. *Kept* is the memory of the residuals, including x. *Peak* is the memory of forward +
backward besides their inputs, including gradients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moe_layer_peers import IN_TORCH, PEERS, Layer, Shape, build, random_in_jax

from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels.experts.backends import BACKENDS

PRESETS = {name: Shape(layer.experts, layer.top_k, layer.hidden, layer.inter) for name, layer in EXPERT_LAYERS.items()}
"""Sizes of published models' layers. All use the same routing: softmax over all experts and top-k."""

COLUMNS = {
    "preset": "layer",
    "tokens": "tokens",
    "system": "system",
    "fwd_ms": "forward ms",
    "fwd_bwd_ms": "fwd+bwd ms",
    "fwd_tflops": "fwd TFLOP/s",
    "fwd_bwd_tflops": "fwd+bwd TFLOP/s",
    "of_ceiling": "of ceiling",
    "kept_mib": "kept MiB",
    "peak_mib": "peak MiB",
    "note": "note",
}
CEILING = "dense matmul"
PACKAGES = ("jax", "torch", "triton", "transformers", "sonic-moe", "quack-kernels", "scattermoe", "tokamax")
WARM_UP_SECONDS = 1.0
GROUP_SECONDS = 2.0


def main() -> None:
    """Prints a row for each preset, number of tokens and system; with --output also writes JSON, a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="our backends to time, unless --systems is given"
    )
    parser.add_argument("--systems", nargs="+", choices=(*BACKENDS, *PEERS), help="default: the --backends and every peer")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--precision",
        default="bf16",
        choices=("bf16", "fp8", "fp8_kept"),
        help="of our own backends; FP8 copies are made before",
    )
    parser.add_argument("--runs", type=int, default=5, help="groups of launches")
    parser.add_argument("--launches", type=int, default=20, help="calls in a group")
    parser.add_argument("--check", action="store_true", help="compare y and gradients with f64; small layers, float32")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: a new seed for each run")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one system on one preset; SonicMoE tunes long")
    parser.add_argument("--output", type=Path, help="a folder for moe_layer.json, moe_layer.md and moe_layer.png")
    sizes = {"experts": "--experts", "k": "--top-k", "hidden": "--hidden", "inter": "--intermediate"}
    for field, flag in sizes.items():
        parser.add_argument(flag, dest=field, type=int, help="replaces the preset's size")
    parser.add_argument("--in-this-process", nargs=2, metavar=("PRESET", "SYSTEM"), help="measure and print JSON lines")
    args = parser.parse_args()
    other_sizes = {field: getattr(args, field) for field in sizes if getattr(args, field) is not None}
    if args.in_this_process is not None:
        preset, system = args.in_this_process
        for tokens in args.tokens:
            row = measure(preset, system, replace(PRESETS[preset], **other_sizes), tokens, args)
            print(json.dumps(row), flush=True)
        return
    run = {
        "command": " ".join(["python", "benchmarks/moe_layer.py", *sys.argv[1:]]),
        "sizes": {preset: vars(replace(PRESETS[preset], **other_sizes)) for preset in args.presets},
        "dtype": args.dtype,
        "precision": args.precision,
        "seed": args.seed,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }
    for name, value in run.items():
        print(f"{name}: {value}")
    print(_line(list(COLUMNS.values())), flush=True)
    rows, ceilings = [], {}
    for preset in args.presets:
        for system in (CEILING, *(args.systems or (*args.backends, *PEERS))):
            for row in _in_a_process(preset, system, args):
                case = row["preset"], row["tokens"]
                if system == CEILING:
                    ceilings[case] = row.get("fwd_tflops")
                elif ceilings.get(case) and "fwd_bwd_tflops" in row:
                    row["of_ceiling"] = row["fwd_bwd_tflops"] / ceilings[case]
                rows.append(row)
                print(_line(_cells(row)), flush=True)
    if args.output is not None:
        write(run, rows, args.output)


def measure(preset: str, system: str, shape: Shape, tokens: int, args: argparse.Namespace) -> dict:
    """Returns one system's row at one number of tokens, with a note for everything that could not be measured."""
    row: dict = {"preset": preset, "tokens": tokens, "system": system}
    flops = 6 * tokens * shape.k * shape.hidden * shape.inter
    try:
        if system == CEILING:
            return row | measure_ceiling(shape, tokens, args)
        layer = build(system, shape, tokens, args.dtype, args.seed, args.precision)
    except Exception as error:  # One system's failure is a row, not the end of the others.
        return row | {"note": _reason(error)}
    row["device"] = layer.device
    stages = [
        lambda: timed("fwd", layer.forward, layer.wait, flops, args),
        layer.memory,
        lambda: timed("fwd_bwd", layer.step, layer.wait, 3 * flops, args),
    ]
    if layer.round_weights is not None:
        # Once a step, whatever the number of micro-batches: no part of the other times.
        stages.append(lambda: {"round_weights_ms": median_ms(layer.round_weights, layer.wait, args)[0]})
    if args.check:
        stages.append(lambda: {"differences": differences(layer, shape.k)})
    notes = []
    for stage in stages:
        try:
            row |= stage()
        except Exception as error:
            notes.append(_reason(error))
    if "round_weights_ms" in row:
        notes.append(f"{args.precision}, rounding the weights: {row['round_weights_ms']:.3f} ms a step")
    if "differences" in row:
        notes.append("from f64: " + ", ".join(f"{name} {value:.1e}" for name, value in row["differences"].items()))
    return row | {"note": "; ".join(dict.fromkeys(notes))}


def measure_ceiling(shape: Shape, tokens: int, args: argparse.Namespace) -> dict:
    """Times a dense matmul: its rows are the choices of all tokens, its matrix is one expert's gate-up."""
    import jax
    import jax.numpy as jnp

    alone = replace(shape, experts=1)
    x, _, w_gate_up, *_ = random_in_jax(alone, tokens * shape.k, args.dtype, args.seed, transposed=True)
    matmul = jax.jit(jnp.matmul).lower(x, w_gate_up[0]).compile()
    w, device = w_gate_up[0], jax.devices()[0].device_kind
    flops = 4 * tokens * shape.k * shape.hidden * shape.inter
    return timed("fwd", lambda: matmul(x, w), jax.block_until_ready, flops, args) | {"device": device, "note": device}


def timed(name: str, start: Callable, wait: Callable, flops: float, args: argparse.Namespace) -> dict:
    """Returns the milliseconds of one call, TFLOP/s, and the number of calls in a group."""
    ms, launches = median_ms(start, wait, args)
    return {f"{name}_ms": ms, f"{name}_tflops": flops / ms / 1e9, f"{name}_launches": launches}


def median_ms(start: Callable, wait: Callable, args: argparse.Namespace) -> tuple[float, int]:
    """Returns the milliseconds of one call, and the number of calls in a group."""
    wait(start())  # Compiles and tunes.
    began, calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < WARM_UP_SECONDS or calls == 0:
        wait(start())
        calls += 1
    launches = max(1, min(args.launches, int(GROUP_SECONDS * calls / seconds)))
    groups = []
    for _ in range(args.runs):
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
    import jax
    import jax.numpy as jnp
    import numpy as np

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


def write(run: dict, rows: list[dict], folder: Path) -> None:
    """Writes the run and its rows as JSON, Markdown table and plot; each file is complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "moe_layer.json", lambda path: path.write_text(json.dumps({"run": run, "rows": rows}, indent=1) + "\n"))
    facts = "".join(f"- {name}: `{value}`\n" for name, value in run.items())
    table = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *(_cells(row) for row in rows)]
    lines = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n" for cells in table)
    _replace(folder / "moe_layer.md", lambda path: path.write_text(f"{facts}\n{lines}"))
    _replace(folder / "moe_layer.png", lambda path: plot(rows, path))


def plot(rows: list[dict], path: Path) -> None:
    """Plots TFLOP/s of forward + backward over tokens, one panel for each preset; the dashed line is the ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    presets = list(dict.fromkeys(row["preset"] for row in rows))
    systems = [name for name in dict.fromkeys(row["system"] for row in rows) if name != CEILING]
    figure, axes = pyplot.subplots(1, len(presets), figsize=(5.5 * len(presets), 4.5), squeeze=False, layout="constrained")
    for axis, preset in zip(axes[0], presets, strict=True):
        measured = [row for row in rows if row["preset"] == preset]
        for index, system in enumerate(systems):
            points = [
                (row["tokens"], row["fwd_bwd_tflops"])
                for row in measured
                if row["system"] == system and "fwd_bwd_tflops" in row
            ]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=system, color=f"C{index}")
        points = [(row["tokens"], row["fwd_tflops"]) for row in measured if row["system"] == CEILING and "fwd_tflops" in row]
        if points:
            axis.plot(*zip(*sorted(points), strict=True), "--", color="black", label=CEILING)
        tokens = sorted({row["tokens"] for row in measured})
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axis.set(title=preset, xlabel="tokens", ylabel="TFLOP/s, forward + backward", ylim=(0, None))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=150, format="png")


def _in_a_process(preset: str, system: str, args: argparse.Namespace) -> list[dict]:
    # In a torch process JAX runs on the CPU: else it would allocate most GPU memory when the reference first runs.
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if system in IN_TORCH else {})
    own = ["--seed", str(args.seed), "--in-this-process", preset, system]
    command = [sys.executable, __file__, *sys.argv[1:], *own]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=environment)
        last = child.stderr.strip().splitlines()[-1:]
        lines, end = child.stdout, f"ended with status {child.returncode}: {''.join(last)}"[:120]
    except subprocess.TimeoutExpired as error:
        lines, end = (error.stdout or b"").decode(), f"not done in {args.timeout} s"
    rows = [json.loads(line) for line in lines.splitlines() if line.startswith('{"preset"')]
    measured = {row["tokens"] for row in rows}
    lost = [{"preset": preset, "tokens": n, "system": system, "note": end} for n in args.tokens if n not in measured]
    return rows + lost


def _reason(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, ImportError):
        return f"cannot be imported: {first_line}"[:120]
    return f"{type(error).__name__}: {first_line}"[:120]


def _line(cells: list[str]) -> str:
    *columns, note = cells
    return " ".join(f"{cell:>15}" for cell in columns) + f"  {note}"


def _cells(row: dict) -> list[str]:
    """Returns a row's columns as text; `-` if nothing was measured."""

    def text(name: str) -> str:
        value = row.get(name, "" if name == "note" else "-")
        if isinstance(value, str | int):
            return str(value)
        return f"{value:.1%}" if name == "of_ceiling" else f"{value:.3f}" if name.endswith("_ms") else f"{value:.1f}"

    return [text(name) for name in COLUMNS]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _replace(path: Path, write_to: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    write_to(temporary)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
