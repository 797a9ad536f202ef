"""Times one whole MoE layer, forward and backward: ours on each backend beside every alternative that can be imported.

    python benchmarks/moe_layer.py                                          # Qwen3-30B-A3B's layer, every system
    python benchmarks/moe_layer.py --presets deepseek-v3 --tokens 16384 --systems mosaic sonicmoe --output results/
    python benchmarks/moe_layer.py --presets small --tokens 256 --systems xla ragged_dot --dtype float32   # on a CPU

The layer is router matmul, softmax, top-k and experts, with gradients to x and all weights; random data, random routing.
Every system runs in a process of its own on the same GPU. Times are the median of 5 groups of `--launches` calls between two
synchronisations. TFLOP/s count the experts' matrices alone: 6*T*K*D*I forward, three times that with the backward pass.
The ceiling is this GPU's dense bf16 matmul of the gate-up's shape, measured the same way in the same run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PRESETS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "deepseek-v3": (256, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "small": (8, 2, 128, 64),
}
"""experts, choices per token, hidden, intermediate"""

SYSTEMS = ("mosaic", "xla", "sonicmoe", "scattermoe", "grouped_mm", "eager", "tokamax", "ragged_dot")
"""Ours by backend; then torch: SonicMoE, ScatterMoE, transformers' two ways; then JAX: tokamax's and JAX's own ragged_dot."""

COLUMNS = (
    "preset",
    "tokens",
    "system",
    "fwd_ms",
    "fwd_bwd_ms",
    "fwd_tflops",
    "fwd_bwd_tflops",
    "of_ceiling",
    "kept_mib",
    "temp_mib",
)
"""kept_mib: for the backward pass, x included; temp_mib: what forward + backward need at most besides inputs and results."""


def main() -> None:
    """Prints a row for each preset, number of tokens and system; with --output also writes JSON, a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one system on one preset")
    parser.add_argument("--output", type=Path, help="a folder for moe_layer.json, moe_layer.md and moe_layer.png")
    parser.add_argument("--in-this-process", nargs=2, metavar=("PRESET", "SYSTEM"), help="measure and print JSON lines")
    args = parser.parse_args()
    if args.in_this_process is not None:
        measure_all(*args.in_this_process, args)
        return
    print(", ".join(f"{name} {found}" for name in ("jax", "torch", "transformers") if (found := _version(name))), flush=True)
    print(_line(_cells(dict(zip(COLUMNS, COLUMNS, strict=True)))), flush=True)
    rows = []
    for preset in args.presets:
        for system in args.systems:
            for row in _in_a_process(preset, system, args):
                rows.append(row)
                print(_line(_cells(row)), flush=True)
    if args.output is not None:
        write(rows, args.output)


def measure_all(preset: str, system: str, args: argparse.Namespace) -> None:
    """Measures one system at every number of tokens, each result a line of JSON."""
    sizes = PRESETS[preset]
    is_jax = system in ("mosaic", "xla", "tokamax", "ragged_dot")
    layer_of = jax_layer if is_jax else torch_layer
    for tokens in args.tokens:
        row = {"preset": preset, "tokens": tokens, "system": system}
        try:
            forward, both, ceiling, kept, temporary = layer_of(system, tokens, *sizes, args.dtype)
            row["fwd_ms"], row["fwd_bwd_ms"] = _median_ms(forward, args.launches), _median_ms(both, args.launches)
            experts, k, hidden, inter = sizes
            flops = 6 * tokens * k * hidden * inter
            row["fwd_tflops"], row["fwd_bwd_tflops"] = flops / row["fwd_ms"] / 1e9, 3 * flops / row["fwd_bwd_ms"] / 1e9
            dense_ms = _median_ms(ceiling, args.launches)
            row["ceiling_tflops"] = 4 * tokens * k * hidden * inter / dense_ms / 1e9
            row["of_ceiling"] = row["fwd_bwd_tflops"] / row["ceiling_tflops"]
            row["kept_mib"], row["temp_mib"] = kept / 2**20, temporary / 2**20
        except Exception as error:  # One system's failure is a row, not the end of the others.
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
        print(json.dumps(row), flush=True)


def jax_layer(system: str, tokens: int, experts: int, k: int, hidden: int, inter: int, dtype: str):
    """The forward pass, forward and backward, a dense matmul, each to be launched; bytes kept, bytes of temporaries."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax
    import jax.numpy as jnp

    from moe_jax.kernels import experts_mlp

    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), 8))

    def draw(*shape):
        return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5)(next(keys))

    x = draw(tokens, hidden) * hidden**0.5
    router, w_gate_up, w_down = draw(experts, hidden), draw(experts, 2 * inter, hidden), draw(experts, hidden, inter)
    dy = draw(tokens, hidden)

    def layer(x, router, w_gate_up, w_down):
        weights, chosen = jax.lax.top_k(jax.nn.softmax((x @ router.T).astype(jnp.float32)), k)
        weights = weights / weights.sum(axis=1, keepdims=True)
        if system in ("mosaic", "xla"):
            return experts_mlp(x, w_gate_up, w_down, weights, chosen, backend=system)
        return _sorted_experts(system, x, w_gate_up, w_down, weights, chosen)

    def step(x, router, w_gate_up, w_down, dy):
        y, backward = jax.vjp(layer, x, router, w_gate_up, w_down)
        return y, backward(dy)

    parameters = (x, router, w_gate_up, w_down)
    forward, dense = jax.jit(layer), jax.jit(jnp.matmul)
    both = jax.jit(step).lower(*parameters, dy).compile()
    kept = jax.eval_shape(lambda *a: jax.vjp(layer, *a)[1], *parameters)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    # The weights and the router's exist whether anything is kept or not.
    kept -= sum(w.nbytes for w in parameters[1:])
    rows, matrix = draw(tokens * k, hidden), draw(hidden, 2 * inter)
    wait = jax.block_until_ready
    return (
        _Launch(lambda: forward(*parameters), wait),
        _Launch(lambda: both(*parameters, dy), wait),
        _Launch(lambda: dense(rows, matrix), wait),
        kept,
        both.memory_analysis().temp_size_in_bytes,
    )


def _sorted_experts(system, x, w_gate_up, w_down, weights, chosen):
    """The experts as a JAX user writes them by default: sort, ragged_dot, unsort."""
    import jax
    import jax.numpy as jnp

    if system == "tokamax":
        import tokamax

        def dot(rows, w, sizes):
            return tokamax.ragged_dot(rows, w.mT, sizes, implementation="mosaic")
    else:

        def dot(rows, w, sizes):
            return jax.lax.ragged_dot(rows, w.mT, sizes)

    tokens, k = chosen.shape
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=w_gate_up.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(dot(x[order // k], w_gate_up, sizes), 2, axis=1)
    y = dot(jax.nn.silu(gate) * up, w_down, sizes)[jnp.argsort(order)].reshape(tokens, k, -1)
    return jnp.sum(y * weights[:, :, None], axis=1).astype(x.dtype)


def torch_layer(system: str, tokens: int, experts: int, k: int, hidden: int, inter: int, dtype: str):
    """As `jax_layer`, for the systems in torch; bytes are those that its allocator counts, none of them on a CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"device": device, "dtype": getattr(torch, dtype)}
    x = torch.randn(tokens, hidden, **options).requires_grad_()
    dy = torch.randn(tokens, hidden, **options) * hidden**-0.5
    build = {"sonicmoe": _sonicmoe, "scattermoe": _scattermoe}.get(system, _transformers)
    layer, parameters = build(system, experts, k, hidden, inter, options)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def forward():
        with torch.no_grad():
            return layer(x)

    def both():
        return torch.autograd.grad(layer(x), [x, *parameters], dy, allow_unused=True)

    def allocated(peak: bool = False) -> int:
        if device == "cpu":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def wait(_):
        if device == "cuda":
            torch.cuda.synchronize()

    results = both()
    result_bytes = sum(gradient.nbytes for gradient in results if gradient is not None)
    del results
    before = allocated()
    y = layer(x)
    # x is kept by every system; here it exists before the forward pass.
    kept = max(0, allocated() - before - y.nbytes) + x.nbytes
    del y
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    both()
    temporary = max(0, allocated(peak=True) - before - result_bytes)
    rows, matrix = torch.randn(tokens * k, hidden, **options), torch.randn(hidden, 2 * inter, **options)
    return _Launch(forward, wait), _Launch(both, wait), _Launch(lambda: rows @ matrix, wait), kept, temporary


def _transformers(system, experts, k, hidden, inter, options):
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = dict(hidden_size=hidden, moe_intermediate_size=inter, num_experts=experts, num_experts_per_tok=k)
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, experts_implementation=system)
    with torch.device(options["device"]):
        block = Qwen3MoeSparseMoeBlock(config).to(options["dtype"])

    def layer(x):
        y = block(x[None])
        return (y[0] if isinstance(y, tuple) else y)[0]

    return layer, list(block.parameters())


def _scattermoe(system, experts, k, hidden, inter, options):
    import torch
    from scattermoe.mlp import GLUMLP

    router = torch.empty(experts, hidden, **options).requires_grad_()
    block = GLUMLP(hidden, inter, experts, k, activation=torch.nn.SiLU()).to(**options)

    def layer(x):
        weights, chosen = torch.softmax((x @ router.T).float(), dim=-1).topk(k, dim=-1)
        return block(x, (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), chosen)

    return layer, [router, *block.parameters()]


def _sonicmoe(system, experts, k, hidden, inter, options):
    import torch
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    router = torch.empty(experts, hidden, **options).requires_grad_()
    w_gate_up = torch.empty(experts, 2 * inter, hidden, **options).requires_grad_()
    w_down = torch.empty(experts, hidden, inter, **options).requires_grad_()
    stream = torch.cuda.current_stream().cuda_stream

    def layer(x):
        weights = w_gate_up.permute(1, 2, 0), None, w_down.permute(1, 2, 0), None
        switches = dict(is_softmax_over_topk=False, norm_topk_probs=True, concat_layout=True)
        return moe_TC_softmax_topk_layer(x, router, *weights, k, stream, ActivationType.SWIGLU, False, **switches)[0]

    return layer, [router, w_gate_up, w_down]


def write(rows: list[dict], folder: Path) -> None:
    """The rows as JSON, as a Markdown table and as a plot of forward + backward; each file is complete or absent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    table = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(row) for row in rows)]
    _replace(folder / "moe_layer.json", (json.dumps(rows, indent=1) + "\n").encode())
    _replace(folder / "moe_layer.md", "".join(f"| {' | '.join(cells)} |\n" for cells in table).encode())

    presets = list(dict.fromkeys(row["preset"] for row in rows))
    figure, axes = pyplot.subplots(1, len(presets), figsize=(6 * len(presets), 4.5), squeeze=False)
    for axis, preset in zip(axes[0], presets, strict=True):
        measured = [row for row in rows if row["preset"] == preset and "error" not in row]
        for system in dict.fromkeys(row["system"] for row in measured):
            points = [(row["tokens"], row["fwd_bwd_tflops"]) for row in measured if row["system"] == system]
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=system)
        axis.set(title=preset, xlabel="tokens", ylabel="TFLOP/s, forward + backward", xscale="log", ylim=(0, None))
        axis.legend()
    path = folder / ".moe_layer.png"
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")
    os.replace(path, folder / "moe_layer.png")


class _Launch:
    """A function that starts work on the device, and how to wait for what it returned."""

    def __init__(self, start, wait):
        self.start, self.wait = start, wait


def _median_ms(launch: _Launch, launches: int) -> float:
    for _ in range(3):
        result = launch.start()
    launch.wait(result)
    groups = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(launches):
            result = launch.start()
        launch.wait(result)
        groups.append((time.perf_counter() - began) / launches)
    return 1e3 * statistics.median(groups)


def _in_a_process(preset: str, system: str, args: argparse.Namespace) -> list[dict]:
    command = [sys.executable, __file__, *sys.argv[1:], "--in-this-process", preset, system]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
        lines, end = child.stdout, f"ended with status {child.returncode}"
    except subprocess.TimeoutExpired as error:
        lines, end = (error.stdout or b"").decode(), f"not done in {args.timeout} s"
    rows = [json.loads(line) for line in lines.splitlines() if line.startswith('{"preset"')]
    measured = {row["tokens"] for row in rows}
    lost = [{"preset": preset, "tokens": n, "system": system, "error": end} for n in args.tokens if n not in measured]
    return rows + lost


def _line(cells) -> str:
    return " ".join(f"{cell:>15}" for cell in cells)


def _cells(row: dict) -> list[str]:
    """A row's columns as text; of a system that failed, why instead of its figures."""
    shown = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in map(row.get, COLUMNS)]
    return [*shown[:3], row["error"]] if "error" in row else shown


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
