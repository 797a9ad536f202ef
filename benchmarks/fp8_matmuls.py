"""Times the FP8 kernels of the experts beside those of bf16, at the sizes of a published layer, after their errors.

    python benchmarks/fp8_matmuls.py                                   # Qwen3-30B-A3B's layer, 32768 tokens
    python benchmarks/fp8_matmuls.py --presets deepseek-v3 --tokens 16384

Random data and random routing. A line of errors compares each FP8 kernel with f32 products of its operands, and rounding with
the rule. A line of times has milliseconds and TFLOP/s: in bursts of 4 calls with pauses, and under load, when the power limit
has set the clock. W and MHz are read in the middle of the load. Rows of gathers have GB/s of what they read and write.
"""

import argparse
import statistics
import subprocess
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels.experts import mosaic as bf16_kernels
from moe_jax.kernels.experts.fp8 import mosaic as fp8_kernels
from moe_jax.kernels.experts.fp8.quantise import dequantised_matrices, dequantised_rows, quantise_matrices, quantise_rows
from moe_jax.kernels.experts.routing import Plan, plan

LOAD_SECONDS = 0.5


def main() -> None:
    """Prints errors, then a line for each pass in either width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=EXPERT_LAYERS, default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    print_errors()
    for preset in args.presets:
        layer = EXPERT_LAYERS[preset]
        print(f"\n{preset}, {args.tokens} tokens", flush=True)
        print("| pass | width | burst ms | rate | load ms | rate | W | MHz |\n|---|---|---|---|---|---|---|---|", flush=True)
        time_passes(args.tokens, layer.experts, layer.top_k, layer.hidden, layer.inter)


def print_errors() -> None:
    """Prints relative errors of small passes, of operands of either sign and of positive ones."""
    rng = np.random.default_rng(0)
    experts, hidden, inter = 3, 2048, 256
    p = plan(jnp.asarray(2 * rng.integers(0, 2, (300, 1)), jnp.int32), experts, fp8_kernels.ROW_ALIGNMENT)
    has_token = np.asarray(p.token_of_row) < 300

    def error(ours, theirs) -> str:
        a, b = (np.asarray(array, np.float32)[has_token] for array in (ours, theirs))
        return f"{np.linalg.norm(a - b) / np.linalg.norm(b):.2e}"

    for name, of in (("normal", np.asarray), ("positive", np.abs)):
        x = jnp.asarray(of(rng.normal(size=(300, hidden))), jnp.bfloat16)
        gate_up = quantise_matrices(jnp.asarray(of(rng.normal(size=(experts, 2 * inter, hidden))), jnp.float32))
        rows, rounded = fp8_kernels.rows_of_tokens(x, p), quantise_rows(x)
        token = np.asarray(p.token_of_row)[has_token]
        same_values = (
            np.asarray(rows.values.view(jnp.uint8))[has_token] == np.asarray(rounded.values.view(jnp.uint8))[token]
        ).all()
        same_scales = (np.asarray(rows.scales)[:, has_token] == np.asarray(rounded.scales)[:, token]).all()
        of_experts = jnp.einsum("rk,enk->ern", dequantised_rows(rows), dequantised_matrices(gate_up), precision="highest")
        expert = np.minimum(np.asarray(p.expert_of_row), experts - 1)
        sums = np.asarray(of_experts)[expert, np.arange(p.num_rows)]
        h, act = fp8_kernels.gated_matmul(rows, gate_up, p)
        gate, up = np.split(sums.astype(np.float64), 2, axis=1)
        exact = quantise_rows(jnp.asarray(gate * up * (1 + np.tanh(gate / 2)) / 2, jnp.float32))
        print(
            f"{name}: rows' values and scales equal {same_values and same_scales}; h {error(h, sums)}; "
            f"product {error(fp8_kernels.grouped_matmul(rows, gate_up, p), sums)}; "
            f"act {error(dequantised_rows(act), dequantised_rows(exact))}",
            flush=True,
        )


def time_passes(tokens: int, experts: int, top_k: int, hidden: int, inter: int) -> None:
    """Prints the times of each pass of a layer."""
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k], jnp.int32)
    p = jax.jit(partial(plan, num_experts=experts, row_alignment=fp8_kernels.ROW_ALIGNMENT))(chosen)
    flops = 2 * tokens * top_k * hidden * inter

    def line(name: str, width: str, work: float, unit: float, f, *operands) -> None:
        burst, load, watts, clock = times(jax.jit(f), *operands)
        rates = (f"{seconds * 1e3:.3f} | {work / seconds / unit:.0f}" for seconds in (burst, load))
        print(f"| {name} | {width} | {' | '.join(rates)} | {watts} | {clock} |", flush=True)

    x = random(0, (tokens, hidden))
    moved = tokens * hidden * 2 + tokens * top_k * hidden * 2
    line("gather, GB/s", "bf16", moved, 1e9, lambda x, p: bf16_kernels.rows_of_tokens(x, p)[0], x, p)
    moved = tokens * hidden * 2 + tokens * top_k * hidden
    line("gather, GB/s", "fp8", moved, 1e9, fp8_kernels.rows_of_tokens, x, p)

    def both(name: str, work: float, columns: int, summands: int, in_bf16, in_fp8) -> None:
        a, w = random(1, (p.num_rows, summands)), random(2, (experts, columns, summands))
        line(name, "bf16", work, 1e12, in_bf16, a, w, p)
        a, w = jax.jit(quantise_rows)(a), jax.jit(quantise_matrices)(w)
        line(name, "fp8", work, 1e12, in_fp8, a, w, p)

    for keep_h in (False, True):
        gated = [partial(kernels.gated_matmul, keep_h=keep_h) for kernels in (bf16_kernels, fp8_kernels)]
        both("gate_up with h" if keep_h else "gate_up", 2 * flops, 2 * inter, hidden, *gated)
    plain = bf16_kernels.grouped_matmul, fp8_kernels.grouped_matmul
    both("gate_up, product alone", 2 * flops, 2 * inter, hidden, *plain)
    both("down", flops, hidden, inter, *plain)
    both("dx", 2 * flops, hidden, 2 * inter, *plain)
    h, v = random(3, (p.num_rows, 2 * inter)), jnp.ones(p.num_rows)
    backward = bf16_kernels.gated_matmul_backward

    def d_act_in_bf16(dy, w_down_transposed, p: Plan):
        return backward(dy, w_down_transposed.reshape(experts, hidden, inter), h, v, p)

    def d_act_in_fp8(dy, w_down_transposed, p: Plan):
        return fp8_kernels.gated_matmul_backward(dy, w_down_transposed, h, v, p)

    both("d_act", flops, inter, hidden, d_act_in_bf16, d_act_in_fp8)


@partial(jax.jit, static_argnums=(0, 1))
def random(seed: int, shape: tuple[int, ...]):
    """Returns normal numbers in bf16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def times(f, *operands) -> tuple[float, float, str, str]:
    """Returns seconds of a call in bursts and under load, and the load's W and MHz."""
    jax.block_until_ready(f(*operands))
    bursts = []
    for _ in range(5):
        time.sleep(0.1)
        began = time.perf_counter()
        for _ in range(4):
            result = f(*operands)
        jax.block_until_ready(result)
        bursts.append((time.perf_counter() - began) / 4)
    burst = statistics.median(bursts)
    calls = max(8, int(LOAD_SECONDS / burst))
    for _ in range(calls):
        result = f(*operands)
    jax.block_until_ready(result)
    began = time.perf_counter()
    for _ in range(calls):
        result = f(*operands)
    # The calls are queued: the GPU is at work on the first half.
    power = query_power()
    jax.block_until_ready(result)
    return burst, (time.perf_counter() - began) / calls, *power


def query_power() -> tuple[str, str]:
    """Returns the GPU's W and MHz as nvidia-smi tells them."""
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        watts, clock = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return "?", "?"
    return watts, clock


if __name__ == "__main__":
    main()
