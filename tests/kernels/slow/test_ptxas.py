"""The Hopper kernels compiled to machine code for an H200, without one: only the kernels in SPILLS spill registers.

More shared memory than a block can have, 227 KiB, is refused while lowering. Scripts whose kernels have different names share a
process: its imports take two seconds.
"""

import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script

pytestmark = needs_compiler

SPILLS = {"gated_matmul_backward": 264, "fp8_gated_matmul": 12, "fp8_gated_matmul_backward": 440, "sum_rows": 8}
"""Upper bound on the bytes that a thread spills, for kernels whose fastest version exceeds the registers (docs/kernels.md)."""

EXPERTS = """
def step(x, w_gate_up, w_down, weights, chosen, dy):
    y, pullback = jax.vjp(lambda *a: kernels.experts_mlp(*a, chosen, backend="mosaic"), x, w_gate_up, w_down, weights)
    return y, pullback(dy)

tokens = int(sys.argv[1])
x, pairs = ((tokens, 2048), bf16), (tokens, 8)
compile(step, x, ((128, 2 * 768, 2048), bf16), ((128, 2048, 768), bf16), (pairs, f32), (pairs, i32), x)
"""

ADAPTED = """
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.weights import ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank

def step(x, w_gate_up, w_down, weights, chosen, dy, *factors):
    def f(x, weights, *factors):
        changes = LowRank(*factors[:2]), LowRank(*factors[2:])
        matrices = (Matrix(w, change=change) for w, change in zip((w_gate_up, w_down), changes))
        return experts([TokenPart(x, weights, chosen)], ExpertWeights(*matrices, frozen=True), backend="mosaic")[0]

    y, pullback = jax.vjp(f, x, weights, *factors)
    return y, pullback(dy)

tokens = int(sys.argv[1])
x, pairs = ((tokens, 2048), bf16), (tokens, 8)
factors = [(128, 4, 2048), (128, 2 * 768, 4), (128, 4, 768), (128, 2048, 4)]
matrices = ((128, 2 * 768, 2048), bf16), ((128, 2048, 768), bf16)
compile(step, x, *matrices, (pairs, f32), (pairs, i32), x, *((shape, f32) for shape in factors))
"""

CLAMPED = """
def step(x, w_gate_up, w_down, weights, chosen, dy, *biases):
    def f(*a):
        activation = kernels.Activation(alpha=1.702, limit=7.0, offset=1.0)
        return kernels.experts_mlp(*a[:4], chosen, backend="mosaic", activation=activation, biases=a[4:])

    y, pullback = jax.vjp(f, x, w_gate_up, w_down, weights, *biases)
    return y, pullback(dy)

x, pairs, biases = ((32768, 2880), bf16), (32768, 4), [((32, n), bf16) for n in (2 * 2880, 2880)]
compile(step, x, ((32, 2 * 2880, 2880), bf16), ((32, 2880, 2880), bf16), (pairs, f32), (pairs, i32), x, *biases)
"""

FORWARD = """
def step(x, w_gate_up, w_down, weights, chosen):
    return kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen, backend="mosaic")

pairs = int(sys.argv[1]), 8
compile(step, ((pairs[0], 2048), bf16), ((128, 2 * 768, 2048), bf16), ((128, 2048, 768), bf16), (pairs, f32), (pairs, i32))
"""

ONE_TOKEN = """
def step(x, w_gate_up, w_down, weights, chosen):
    return kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen, backend="mosaic")

for hidden, inter, experts, k in ((2048, 768, 128, 8), (7168, 2048, 256, 8), (4096, 14336, 8, 2))[: int(sys.argv[1])]:
    matrices = ((experts, 2 * inter, hidden), bf16), ((experts, hidden, inter), bf16)
    compile(step, ((1, hidden), bf16), *matrices, ((1, k), f32), ((1, k), i32))
"""

GATHERING = """
from moe_jax.kernels.experts.mosaic.by_rows import RowsOperands, matmul_gated
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.experts.routing import plan

for tile in (TileShape(128, 128, 6), TileShape(64, 256, 4)):
    def gate_up(x, w, chosen):
        rows = plan(chosen, 128, 64)
        return matmul_gated(RowsOperands(x, w, rows.token_of_row), rows, tile, keep_h=False)

    compile(gate_up, ((32768, 2048), bf16), ((128, 2 * 768, 2048), bf16), ((32768, 8), i32))
"""

FP8_FORWARD = """
from moe_jax.kernels.experts.fp8 import mosaic
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.routing import plan, plan_of_few

f8, scales = jnp.float8_e4m3fn, lambda n, k: ((128, n // 128, k // 128), f32)

def forward(p, x, gate_up, gate_up_scales, down, down_scales, keep_h):
    rows = mosaic.rows_of_tokens(x, p)
    h, act = mosaic.gated_matmul(rows, QuantisedMatrices(gate_up, gate_up_scales), p, keep_h=keep_h)
    return h, mosaic.grouped_matmul(act, QuantisedMatrices(down, down_scales), p)
"""

FP8 = (
    FP8_FORWARD
    + """
def step(x, chosen, dy, weight_of_row, *matrices):
    p = plan(chosen, 128, 64)
    h, y = forward(p, x, *matrices[:4], keep_h=True)
    dy = mosaic.rows_of_tokens(dy, p)
    return y, mosaic.gated_matmul_backward(dy, QuantisedMatrices(*matrices[4:]), h, weight_of_row, p)

x, pairs = ((32768, 2048), bf16), ((32768, 8), i32)
matrices = ((128, 1536, 2048), f8), scales(1536, 2048), ((128, 2048, 768), f8), scales(2048, 768)
rows = jax.eval_shape(lambda: plan(jnp.zeros(pairs[0], i32), 128, 64)).num_rows
compile(step, x, pairs, x, ((rows,), f32), *matrices, ((128, 768, 2048), f8), scales(768, 2048))
# Tokens that were rounded before. Other tests compile the kernel that gathers their scales.
for tokens in (32768,) * (int(sys.argv[1]) > 1):
    compile(lambda *rows: mosaic.rows_of_rounded(QuantisedRows(*rows[:2]), plan(rows[2], 128, 64)),
            ((tokens, 2048), f8), ((16, tokens), f32), pairs)
    compile(lambda h: mosaic.kept_h(h, "fp8"), ((tokens, 1536), bf16))
    compile(mosaic.matrices_in_both_orders, ((128, 1536, 2048), bf16))
for tokens, make_plan in ((64, plan_of_few), (32768, plan), (256, plan), (5, plan_of_few))[: int(sys.argv[1])]:
    f = lambda x, chosen, *matrices: forward(make_plan(chosen, 128, 64), x, *matrices, keep_h=False)
    compile(f, ((tokens, 2048), bf16), ((tokens, 8), i32), *matrices)
"""
)

FP8_LARGE = (
    FP8_FORWARD
    + """
pairs, pairs_of_half = ((32768, 8), i32), ((16384, 8), i32)
# Matrices of more than 8 MiB have another order of tiles, and the kernel other code.
large = ((128, 2 * 1536, 4096), f8), scales(2 * 1536, 4096), ((128, 4096, 1536), f8), scales(4096, 1536)
compile(lambda x, chosen, *w: forward(plan(chosen, 128, 64), x, *w, keep_h=True), ((32768, 4096), bf16), pairs, *large)
large = ((128, 2 * 2048, 7168), f8), scales(2 * 2048, 7168), ((128, 7168, 2048), f8), scales(7168, 2048)
compile(lambda x, chosen, *w: forward(plan(chosen, 128, 64), x, *w, keep_h=False), ((16384, 7168), bf16), pairs_of_half, *large)
backward = lambda dy, chosen, h, v, w, s: mosaic.gated_matmul_backward(
    mosaic.rows_of_tokens(dy, plan(chosen, 128, 64)), QuantisedMatrices(w, s), h, v, plan(chosen, 128, 64))
rows_of_half = jax.eval_shape(lambda: plan(jnp.zeros(pairs_of_half[0], i32), 128, 64)).num_rows
compile(backward, ((16384, 7168), bf16), pairs_of_half, ((rows_of_half, 4096), bf16), ((rows_of_half,), f32),
    ((128, 2048, 7168), f8), scales(2048, 7168))
"""
)

FP8_DENSE = """
from moe_jax.kernels import fp8_matmul

def step(x, *arrays):
    matrices, dys = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    ys, pullback = jax.vjp(lambda x, *matrices: [fp8_matmul(x, w, backend="mosaic") for w in matrices], x, *matrices)
    return ys, pullback(list(dys))

# q, k and v of Qwen3-30B-A3B, kv_a and kv_b of DeepSeek-V3, and few tokens.
for tokens, k, columns in ((32768, 2048, (4096, 512, 512)), (16384, 7168, (576,)), (16384, 512, (32768,)), (40, 2048, (512,))):
    compiled = compile(step, ((tokens, k), bf16), *[((n, k), f32) for n in columns], *[((tokens, n), bf16) for n in columns])
    kernels_of_step = sum("mosaic_gpu" in line and "custom-call(" in line for line in compiled.as_text().splitlines())
    # x is rounded once for all matrices that read it; a matrix has its product, the rounding of dy, and dx.
    assert kernels_of_step == 1 + 3 * len(columns), kernels_of_step
"""

TOP_K = """
from moe_jax.kernels.top_k import top_k_indices

for experts, k in ((256, 22), (128, 8), (256, 8), (32, 2), (8, 4))[: int(sys.argv[1])]:
    compile(lambda x: top_k_indices(x, k), ((16384, experts), f32))
"""

FP8_ONE_TOKEN = """
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices

f8, scales = jnp.float8_e4m3fn, lambda e, n, k: ((e, n // 128, k // 128), f32)

def step(x, weights, chosen, *w):
    matrices = QuantisedMatrices(*w[:2]), QuantisedMatrices(*w[2:])
    return kernels.experts_mlp(x, *matrices, weights, chosen, precision=kernels.Precision(), backend="mosaic")

for hidden, inter, experts, k in ((2048, 768, 128, 8), (7168, 2048, 256, 8), (4096, 14336, 8, 2))[: int(sys.argv[1])]:
    gate_up, down = (experts, 2 * inter, hidden), (experts, hidden, inter)
    matrices = (gate_up, f8), scales(*gate_up), (down, f8), scales(*down)
    compile(step, ((1, hidden), bf16), ((1, k), f32), ((1, k), i32), *matrices)
"""

SUMS = """
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.routing import plan

def step(rows, chosen, weights=None):
    return mosaic.token_sums(rows, plan(chosen, 32, mosaic.ROW_ALIGNMENT), weights, shares=3)[1]

for hidden, k, weighted in ((2048, 8, True), (4096, 2, False))[: int(sys.argv[1])]:
    pairs = 3 * 256, k
    rows = jax.eval_shape(lambda: plan(jnp.zeros(pairs, i32), 32, mosaic.ROW_ALIGNMENT)).num_rows
    compile(step, ((rows, hidden), bf16), (pairs, i32), *[(pairs, f32)] * weighted)
"""

TOTALS = """
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.routing import plan
from moe_jax.layers.passes import put_layer, take_layer

def step(totals, dh, x, chosen):
    rows = plan(chosen, 128, mosaic.ROW_ALIGNMENT)
    sources = dict(a_source_of_row=rows.token_of_row, b_source_of_row=rows.token_of_row)

    def layer(i, totals):
        return put_layer(totals, mosaic.grouped_outer(dh, x, rows, f32, **sources, accumulate_into=take_layer(totals, i)), i)

    return jax.lax.fori_loop(0, 4, layer, totals)

for m, n in ((2 * 768, 2048), (2048, 768)):
    compiled = compile(step, ((4, 128, m, n), f32), ((1024, m), bf16), ((1024, n), bf16), ((1024, 8), i32), donate=0)
    found = compiled.memory_analysis()
    assert found.alias_size_in_bytes == 4 * 128 * m * n * 4, found
    assert found.temp_size_in_bytes < 128 * m * n * 4 / 2, f"a layer's totals are copied: {found}"
"""

SCANNED_TOTALS = """
import re
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights

def loss(totals, x, w_gate_up, w_down, weights, chosen):
    def layer(x, arrays):
        w_gate_up, w_down, *totals = arrays
        matrices = ExpertWeights.of(w_gate_up, w_down, gradient=Accumulators(*totals))
        return x + experts([TokenPart(x, weights, chosen)], matrices, backend="mosaic")[0], None

    return jax.lax.scan(layer, x, (w_gate_up, w_down, *totals))[0].astype(f32).sum()

x, pairs, gate_up, down = (256, 256), (256, 2), (3, 4, 256, 256), (3, 4, 256, 128)
step = lambda gate_up, down, *others: jax.grad(loss)((gate_up, down), *others)
shapes = (gate_up, f32), (down, f32), (x, bf16), (gate_up, bf16), (down, bf16), (pairs, f32), (pairs, i32)
computations = re.split(r"\\n(?=%|ENTRY)", compile(step, *shapes).as_text())
in_place = [text.split()[0] for text in computations if "mosaic_gpu" in text and "output_to_operand_aliasing" in text]
assert in_place and not any("dynamic-slice-fusion" in name for name in in_place), in_place
"""

BY_TURNS = """
from moe_jax.kernels.experts.mosaic.tile_limits import PASSES, candidates
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.experts.mosaic.tune import operand_shapes, run_pass

def step(tile, pass_name, chosen, *operands):
    return run_pass(pass_name, tile, plan(chosen, 128, 64), *operands)

for pass_name in PASSES:
    matrix = (2048, 768) if pass_name in ("grouped_matmul", "gated_matmul_backward") else (2 * 768, 2048)
    shapes = operand_shapes(pass_name, matrix, jax.eval_shape(lambda: plan(jnp.zeros((1024, 8), i32), 128, 64)).num_rows, 128)
    for tile in candidates(pass_name, matrix):
        if tile.ping_pong:
            run = lambda *a: step(tile, pass_name, *a)
            compile(run, ((1024, 8), i32), *((shape, bf16 if len(shape) > 1 else f32) for shape in shapes))
"""

ATTENTION = """
def step(q, k, v, ids, d_out, d_lse):
    attention = lambda *a: flash_attention(*a, scale=128**-0.5, segment_ids=ids)
    out, pullback = jax.vjp(attention, q, k, v)
    return out, pullback((d_out, d_lse))

q, kv = ((8, 4096, 32, 128), bf16), ((8, 4096, 4, 128), bf16)
compile(step, q, kv, kv, ((8, 4096), i32), q, ((8, 32, 4096), f32))
"""

PAGED_ATTENTION = """
from moe_jax.kernels.attention.paged import PagedQueries, paged_attention

# Decoding of many rows and of few, whose keys are split, and chunks of prompts.
first = (256, 256, 32, 4, 128, None), (4, 4, 32, 4, 128, 1024), (8, 2048, 32, 4, 128, 4096)
others = (4, 4, 32, 4, 128, None), (8, 2048, 32, 4, 128, None), (256, 256, 8, 8, 64, None), (256, 256, 32, 4, 128, 4096)
others += (8, 2048, 32, 4, 64, None), (8, 2048, 16, 4, 128, None)
for rows, tokens, heads, kv_heads, width, window in (first + others)[: int(sys.argv[1])]:
    def step(q, keys, values, *queries):
        options = dict(scale=0.1, window=window, single_query_rows=rows * (rows == tokens), backend="mosaic")
        return paged_attention(q, keys, values, PagedQueries(*queries), **options)

    pages = ((512, kv_heads, 64, width), bf16)
    compile(step, ((tokens, heads, width), bf16), pages, pages, ((rows + 1,), i32), ((rows,), i32), ((rows, 128), i32))
"""

PAGES_IN_FP8 = """
from moe_jax.kernels.attention.paged import PagedQueries, paged_attention
from moe_jax.kernels.attention.paged.fp8 import F8, FP8Pages

# Decoding of many rows, and of few, whose keys are split, and heads of 64 columns.
for rows, width in ((256, 128), (4, 128), (256, 64))[: int(sys.argv[1])]:
    def step(q, k, k_exponents, v, v_exponents, *queries):
        pages = FP8Pages(k, k_exponents), FP8Pages(v, v_exponents)
        options = dict(scale=0.1, single_query_rows=rows, backend="mosaic")
        return paged_attention(q, *pages, PagedQueries(*queries), **options)

    pages = ((512, 4, 64, width), F8), ((512, 4, 64), jnp.uint8)
    compile(step, ((rows, 32, width), bf16), *pages, *pages, ((rows + 1,), i32), ((rows,), i32), ((rows, 128), i32))
"""

PAGED_LATENTS = """
from moe_jax.kernels.attention.paged import PagedQueries, paged_attention

# Decoding of 64 heads, with a window too, drafts, a chunk of a prompt, and decoding of 16 and of 128 heads.
first = (256, 256, 64, None), (4, 4, 64, 4096), (64, 192, 128, None)
others = (1, 512, 128, None), (256, 256, 16, None), (4, 4, 128, None)
for rows, tokens, heads, window in (first + others)[: int(sys.argv[1])]:
    def step(q, latents, *queries):
        options = dict(scale=0.1, window=window, value_dim=512, single_query_rows=rows * (rows == tokens), backend="mosaic")
        return paged_attention(q, latents, None, PagedQueries(*queries), **options)

    arrays = ((tokens, heads, 576), bf16), ((512, 1, 64, 576), bf16)
    compile(step, *arrays, ((rows + 1,), i32), ((rows,), i32), ((rows, 128), i32))
"""

STRICT_MATMUL = """
from moe_jax.kernels.strict.matmul import matmul, matmul_in_parts

# Parts that are added in registers, and written apart.
for rows in (8192, 64, 256)[: int(sys.argv[1])]:
    matrices = [((n, 2048), bf16) for n in (4096, 512, 512)]
    compile(matmul_in_parts, ((rows, 2048), bf16), *matrices)
# Tiles of 16, 64, 128 and 256 columns.
sizes = (64, 4096, 2048), (64, 2048, 151936), (256, 2048, 151936), (1, 2048, 128), (8192, 2048, 128), (8192, 4096, 2048)
for rows, k, n in sizes[: int(sys.argv[1])]:
    for f in matmul, matmul_in_parts:
        compile(f, ((rows, k), bf16), ((n, k), bf16))
"""

PROJECTIONS = """
from moe_jax.kernels.decode.project import project

# Each of the five kinds of tiles that the rule chooses.
for tokens in (256, 2, 128)[: int(sys.argv[1])]:
    matrices = [((n, 2048), bf16) for n in (4096, 512, 512)]
    compile(project, ((tokens, 2048), bf16), *matrices)
    compile(project, ((tokens, 4096), bf16), ((2048, 4096), bf16))
"""

STRICT_ROWS = """
from moe_jax.kernels.strict.rows import gated_silu, log_sum_exp, norm_rows

compile(log_sum_exp, ((256, 151936), f32))
compile(lambda h: gated_silu(h, dtype=bf16), ((256, 2 * 12288), f32))
compile(lambda x, w: norm_rows(x, w, eps=1e-6), ((256, 2048), bf16), ((2048,), bf16))
"""

EXPERTS_KERNELS = {
    "gather_rows_kernel", "gated_matmul", "grouped_matmul", "gated_matmul_backward", "grouped_matmul_transposed",
    "grouped_outer",
}  # fmt: skip
FP8_KERNELS = {"fp8_gather_rows", "fp8_round_tokens", "fp8_gated_matmul", "fp8_grouped_matmul", "fp8_gated_matmul_backward"}
PAIRS_KERNELS = {"gated_matmul_of_pairs", "matmul_of_pairs", "fp8_gated_matmul_of_pairs", "fp8_matmul_of_pairs"}
ATTENTION_KERNELS = {
    "flash_attention_forward", "flash_attention_backward_queries", "flash_attention_backward_keys", "paged_attention",
    "paged_attention_split", "paged_attention_prompts", "merge_splits", "paged_latents", "paged_latents_split",
}  # fmt: skip
ROWS_KERNELS = {"top_k", "sum_rows", "strict_parts", "strict_merge", "strict_gated_silu", "strict_norm"}
ALL_ATTENTION = ATTENTION + PAGED_ATTENTION + PAGES_IN_FP8 + PAGED_LATENTS

CASES = {
    # The experts of Qwen3-30B-A3B, and a forward pass alone, which gathers the rows.
    "experts": (EXPERTS + FORWARD, 32768, EXPERTS_KERNELS),
    "fp8": (FP8, 1, FP8_KERNELS),
    # To sequences, and to pages of keys or of latents, of decoding rows and of chunks.
    "attention": (ALL_ATTENTION, 3, ATTENTION_KERNELS),
    # Strict bits, a router's choice, a token's sum.
    "rows": (STRICT_ROWS + TOP_K + SUMS, 1, ROWS_KERNELS),
}
"""{name: (script, argument, kernels)}. A number below 99 takes the first sizes of each list of a script."""
THOROUGH = {
    "experts, few tokens": (EXPERTS + FORWARD, 64, EXPERTS_KERNELS),
    # The backward pass keeps what was clamped: 96 bytes stored and 96 loaded by ptxas of CUDA 13.5.
    "clamped experts with biases": (CLAMPED, 0, EXPERTS_KERNELS, {"gated_matmul_backward": 256}),
    "experts with changes": (ADAPTED, 32768, EXPERTS_KERNELS),
    "one token": (ONE_TOKEN + FP8_ONE_TOKEN, 99, PAIRS_KERNELS),
    "tiles that gather": (GATHERING, 0, {"gated_matmul"}, {"gated_matmul": 12}),
    "fp8, all sizes": (FP8, 99, FP8_KERNELS | {"gather_rows_kernel", "fp8_keep_rows", "fp8_round_matrices"}),
    # Their kernels visit their tiles in another order.
    "fp8, large matrices": (FP8_LARGE, 0, FP8_KERNELS - {"fp8_round_tokens"}),
    # Matrices that read one x round it once.
    "fp8, dense": (FP8_DENSE, 0, {"fp8_gather_rows", "fp8_grouped_matmul"}),
    # XLA copies no layer's totals out of the stack and none back: the kernel reads and writes them there.
    "accumulators of stacked layers": (TOTALS, 0, {"grouped_outer"}),
    # XLA fuses a kernel with slices of its operands and results, also if it changes one array and writes another.
    "accumulators of a scan": (SCANNED_TOTALS, 0, EXPERTS_KERNELS),
    "ping-pong": (BY_TURNS, 0, EXPERTS_KERNELS - {"gather_rows_kernel"}),
    "attention, all sizes": (ALL_ATTENTION, 99, ATTENTION_KERNELS),
    # The matmul of a decoding step's projections, and of strict bits from one row to thousands.
    "projections": (PROJECTIONS + STRICT_MATMUL, 99, {"project_tokens", "strict_matmul"}),
    "rows, all sizes": (STRICT_ROWS + TOP_K + SUMS, 99, ROWS_KERNELS),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)])
def test_spills(name):
    """The compiled kernels are the expected ones, and none spills more than is allowed."""
    script, argument, kernels, *more = (CASES | THOROUGH)[name]
    spilled, allowed = spilled_bytes(script, argument), SPILLS | dict(*more)
    assert spilled.keys() == kernels
    assert {name: count for name, count in spilled.items() if count > allowed.get(name, 0)} == {}


def spilled_bytes(script, argument):
    """Returns {kernel: bytes that a thread spills} for the programs that the script compiles."""
    remark = r"Compiling entry function '(\w+)_mosaic_gpu_kernel'.*\n.*\n.* (\d+) bytes spill stores"
    kernels = re.findall(remark, run_script(script, argument))
    return {name: max(int(count) for other, count in kernels if other == name) for name, _ in kernels}
