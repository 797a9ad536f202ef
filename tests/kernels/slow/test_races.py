"""The race detector finds nothing in any Hopper kernel. Other tests run kernels without it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.attention.mosaic.flash import flash_attention
from moe_jax.kernels.attention.online_softmax import BackwardInputs
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.fp8 import mosaic as fp8_mosaic
from moe_jax.kernels.experts.fp8.mosaic import by_rows as fp8_rows
from moe_jax.kernels.experts.fp8.mosaic.by_rows_backward import matmul_gated_backward as fp8_backward
from moe_jax.kernels.experts.fp8.mosaic.promoted import Fp8TileShape
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.mosaic.by_experts import OuterOperands, outer
from moe_jax.kernels.experts.mosaic.tune import operand_shapes, run_pass
from moe_jax.kernels.hopper import launch
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.low_rank import RowsChange
from tests.helpers import races, serving_races
from tests.helpers.compiled_steps import plan, plan_of_few, quantise_matrices, quantise_rows
from tests.helpers.expert_layers import chosen_so_often
from tests.helpers.serving_races import normal

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="JAX's race detector needs the interpreter")

EXPERTS, MATRIX = 3, (256, 256)
"""The sizes of a pass over the experts: two tiles of columns or more, and more steps than the pipeline has stages."""


def rows_of_experts(*counts):
    """The plan of tokens with one choice each; several tiles of rows an expert, and an expert without any."""
    return plan(chosen_so_often(counts, sum(counts)), EXPERTS, mosaic.ROW_ALIGNMENT)


def a_pass(pass_name, tile):
    """One pass over the experts with a given tile."""

    def case(rng):
        # Two tiles of rows for each of the two experts that have any.
        rows = rows_of_experts(tile.rows + 36, 0, tile.rows + 6)
        shapes = operand_shapes(pass_name, MATRIX, rows.num_rows, EXPERTS)
        operands = [normal(rng, *shape, dtype=jnp.bfloat16 if len(shape) > 1 else jnp.float32) for shape in shapes]
        return lambda *operands: run_pass(pass_name, tile, rows, *operands), operands

    return case


def changed_product(rng):
    """A matrix with a change, whose step is the last of each tile."""
    rows = rows_of_experts(70, 0, 130)
    change = RowsChange(normal(rng, rows.num_rows, 64), normal(rng, EXPERTS, 128, 64))
    arrays = normal(rng, rows.num_rows, 128), normal(rng, EXPERTS, 128, 128)
    return lambda *arrays: mosaic.grouped_matmul(*arrays, rows, change=change), arrays


def accumulating_outer(rng):
    """Products of the rows of two parts, added to what is there."""
    plans = rows_of_experts(100, 0, 70), rows_of_experts(0, 0, 130)
    rows = [normal(rng, rows.num_rows, columns) for rows in plans for columns in (128, 256)]

    def f(accumulator, a, b, more_a, more_b):
        parts = [OuterOperands(a, b, plans[0]), OuterOperands(more_a, more_b, plans[1])]
        return outer(parts, TileShape(64, 128, 2), jnp.float32, accumulator)

    return f, [normal(rng, EXPERTS, 128, 256, dtype=jnp.float32), *rows]


def gathered_rows(rng):
    """Every token goes to two experts; one expert has no token."""
    chosen = jnp.asarray(2 * np.argsort(rng.random((96, 2)), axis=1), jnp.int32)
    rows = plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT)
    return lambda x: mosaic.rows_of_tokens(x, rows)[0], [normal(rng, 96, 256)]


def fp8_pass(f, summands=384):
    """A pass in FP8: f(rows [.., 384], matrices [.., 512, 384], the plan), with more steps than slots, and two tiles."""

    def case(rng):
        rows = rows_of_experts(140, 0, 80)
        a, w = quantise_rows(normal(rng, rows.num_rows, summands)), quantise_matrices(normal(rng, EXPERTS, 512, summands))
        return lambda *flat: f(QuantisedRows(*flat[:2]), QuantisedMatrices(*flat[2:4]), rows, *flat[4:]), [*a, *w]

    return case


def fp8_gradients(tile):
    """dSwiGLU of h [.., 1024] in FP8."""

    def case(rng):
        rows = rows_of_experts(140, 0, 80)
        f, arrays = fp8_pass(lambda *operands: fp8_backward(*operands[:2], *operands[3:], operands[2], tile))(rng)
        return f, [*arrays, normal(rng, rows.num_rows, 1024), normal(rng, rows.num_rows, dtype=jnp.float32)]

    return case


def fp8_gathered_rows(rng):
    """Every token goes to two experts; two chunks of tokens and a rest."""
    chosen = jnp.asarray(2 * np.argsort(rng.random((96, 2)), axis=1), jnp.int32)
    rows = plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT)
    return lambda x: fp8_mosaic.rows_of_tokens(x, rows), [normal(rng, 96, 256)]


def fp8_matrices(rng):
    """Three blocks for each thread block, more than it has slots."""
    return lambda w: fp8_mosaic.matrices_in_both_orders(w), [normal(rng, 1, 256, 384)]


def fp8_kept_rows(rng):
    """Two pieces for each thread block."""
    return lambda h: fp8_mosaic.kept_h(h, "fp8"), [normal(rng, 128, 256)]


def plan_of_eleven(rng):
    return plan_of_few(jnp.asarray(rng.integers(0, EXPERTS - 1, (11, 2)), jnp.int32), EXPERTS, mosaic.ROW_ALIGNMENT)


def few_tokens(rng):
    """Eleven tokens that each chosen expert reads where they are; rows are stored 8 at a time."""
    p = plan_of_eleven(rng)
    return lambda x, w: mosaic.gated_matmul(x, w, p, keep_h=False), [normal(rng, 11, 256), normal(rng, EXPERTS, 512, 256)]


def fp8_few_tokens(rng):
    """`few_tokens` in FP8."""
    p = plan_of_eleven(rng)
    w = quantise_matrices(normal(rng, EXPERTS, 512, 384))
    return lambda x, *w: fp8_mosaic.grouped_matmul(fp8_mosaic.rows_of_tokens(x, p), QuantisedMatrices(*w), p), [
        normal(rng, 11, 384),
        *w,
    ]


def fp8_few_pairs(rng):
    """`few_pairs` in FP8, with more slots than the pipeline has, and rows of 9 groups."""
    chosen = jnp.asarray([[rng.integers(8)], [rng.integers(8)], [-1]], jnp.int32)
    matrices = [quantise_matrices(normal(rng, 8, *shape)) for shape in ((256, 1152), (1152, 128))]

    def f(x, *w):
        return fp8_mosaic.experts_of_few_pairs(x, QuantisedMatrices(*w[:2]), QuantisedMatrices(*w[2:]), chosen)

    return f, [normal(rng, 3, 1152), *matrices[0], *matrices[1]]


def few_pairs(rng):
    """Two tokens that each choose two experts, one of them nobody; two tiles of columns each."""
    chosen = jnp.asarray([[rng.integers(8), rng.integers(8)], [rng.integers(8), -1]], jnp.int32)
    arrays = normal(rng, 2, 256), normal(rng, 8, 512, 256), normal(rng, 8, 256, 256)
    return lambda *arrays: mosaic.experts_of_few_pairs(*arrays, chosen), arrays


def sums_of_tokens(rng):
    """The second half of 96 tokens; a third of their choices belongs to nobody here."""
    rows = plan(jnp.asarray(rng.integers(-1, EXPERTS - 1, (96, 4)), jnp.int32), EXPERTS, mosaic.ROW_ALIGNMENT)
    arrays = normal(rng, rows.num_rows, 512), normal(rng, 96, 4, dtype=jnp.float32)
    return lambda values, weights: mosaic.token_sums(values, rows, weights, shares=2)[1], arrays


def whole_sequences(rng):
    """Attention to all tokens, with gradients: two documents and padding, a window."""
    ids = jnp.asarray(np.repeat([1, 2, 0], [150, 220, 30])[None], jnp.int32)
    q, k, v = (normal(rng, 1, 400, heads, 64) for heads in (2, 1, 1))

    def f(q, k, v):
        (out, lse), pullback = jax.vjp(lambda *a: flash_attention(*a, scale=0.1, segment_ids=ids, window=100), q, k, v)
        return out, lse, pullback((out, lse))

    return f, [q, k, v]


def parts_of_sequences(rng):
    """Attention to a part of the keys, added to what other parts gave; queries that see nothing; dk and dv apart."""
    queries, keys = 200, 390
    q, k, v, dout = (normal(rng, 1, *shape) for shape in [(queries, 2, 192), (keys, 1, 192), (keys, 1, 128), (queries, 2, 128)])
    index = np.arange(queries)
    bounds = [jnp.asarray(bound[None], jnp.int32) for bound in (np.where(index < 190, index // 3, keys), index + 50)]
    f32 = {"dtype": jnp.float32}
    sums = normal(rng, 1, queries, 2, 128, **f32), normal(rng, 1, 2, queries, **f32)
    of_queries, of_keys = normal(rng, *q.shape, **f32), (normal(rng, *k.shape, **f32), normal(rng, *v.shape, **f32))

    def f(q, k, v, dout, sums, of_queries, of_keys):
        options = {"scale": 0.1, "backend": "mosaic"}
        out, lse = partial_attention.forward(q, k, v, bounds, previous=sums, **options)
        operands = BackwardInputs(q, k, v, dout, lse, jnp.zeros_like(lse)), bounds
        dq = partial_attention.gradient_of_queries(*operands, previous=of_queries, **options)
        return out, lse, dq, partial_attention.gradients_of_keys(*operands, previous=of_keys, **options)

    return f, [q, k, v, dout, sums, of_queries, of_keys]


ATTENTION = {"flash_attention_forward", "flash_attention_backward_queries", "flash_attention_backward_keys"}
CASES = {
    "gated_matmul": (a_pass("gated_matmul", TileShape(64, 256, 2)), {"gated_matmul"}),
    "gated_matmul, ping-pong": (a_pass("gated_matmul", TileShape(128, 128, 3, ping_pong=True)), {"gated_matmul"}),
    "grouped_matmul, ping-pong": (a_pass("grouped_matmul", TileShape(128, 192, 3, ping_pong=True)), {"grouped_matmul"}),
    "transposed": (a_pass("grouped_matmul_transposed", TileShape(64, 128, 2)), {"grouped_matmul_transposed"}),
    "transposed, ping-pong": (
        a_pass("grouped_matmul_transposed", TileShape(64, 192, 2, ping_pong=True)),
        {"grouped_matmul_transposed"},
    ),
    "backward": (a_pass("gated_matmul_backward", TileShape(64, 256, 2)), {"gated_matmul_backward"}),
    "backward, ping-pong": (
        a_pass("gated_matmul_backward", TileShape(128, 128, 3, ping_pong=True)),
        {"gated_matmul_backward"},
    ),
    "outer, accumulating": (accumulating_outer, {"grouped_outer"}),
    "outer, ping-pong": (a_pass("grouped_outer", TileShape(128, 192, 3, ping_pong=True)), {"grouped_outer"}),
    "gathered rows": (gathered_rows, {"gather_rows_kernel"}),
    "fp8, ping-pong": (
        fp8_pass(lambda *a: fp8_rows.matmul(*a, Fp8TileShape(64, 256, 2, ping_pong=True, steps_of_slot=2)), summands=768),
        {"fp8_grouped_matmul"},
    ),
    "fp8, gated": (
        fp8_pass(lambda a, w, p: fp8_rows.matmul_gated(a, w, p, Fp8TileShape(128, 256, 2), keep_h=True)),
        {"fp8_gated_matmul"},
    ),
    "fp8, backward": (fp8_gradients(Fp8TileShape(128, 256, 2)), {"fp8_gated_matmul_backward"}),
    "fp8, backward, ping-pong": (fp8_gradients(Fp8TileShape(64, 256, 2, ping_pong=True)), {"fp8_gated_matmul_backward"}),
    "fp8, gathered rows": (fp8_gathered_rows, {"fp8_gather_rows"}),
    "few tokens": (few_tokens, {"gated_matmul"}),
    "fp8, matrices": (fp8_matrices, {"fp8_round_matrices"}),
    "fp8, kept rows": (fp8_kept_rows, {"fp8_keep_rows"}),
    "fp8, few tokens": (fp8_few_tokens, {"fp8_round_tokens", "fp8_grouped_matmul"}),
    "fp8, few pairs": (fp8_few_pairs, {"fp8_gated_matmul_of_pairs", "fp8_matmul_of_pairs"}),
    "few pairs": (few_pairs, {"gated_matmul_of_pairs", "matmul_of_pairs"}),
    "sums of tokens": (sums_of_tokens, {"sum_rows"}),
    "attention": (whole_sequences, ATTENTION),
    "attention, parts": (parts_of_sequences, ATTENTION),
    "a change of low rank": (changed_product, {"grouped_matmul"}),
} | serving_races.CASES


THOROUGH = {
    "grouped_matmul, ping-pong", "transposed, ping-pong", "backward, ping-pong", "outer, ping-pong", "few tokens",
    "fp8, ping-pong", "fp8, backward", "fp8, matrices", "fp8, few pairs", "attention, parts", "pages", "pages of windows",
    "merged splits", "heads of a chunk rotated in part",
}  # fmt: skip
"""Other schedules, attention that adds to sums, and pairs in FP8, which go through the pipeline as those in bf16 do. Matrices
reuse their slots in the order of gathered rows.

A ping-pong kernel in bf16 and one in FP8 are always searched.
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name for name in CASES]
)
def test_no_races(rng, no_races, name):
    """Both thread blocks have several tiles."""
    case, kernels = CASES[name]
    f, arguments = case(rng)
    assert races.kernels_of(f, *arguments) == kernels
    jax.block_until_ready(jax.jit(f)(*arguments))


LAUNCH = re.compile(r"(?<!def )\b(launch|plgpu\.kernel)\(")
NAME = re.compile(r'\blaunch\("(\w+)"')
HEADER = re.compile(r"^Kernels? ((?:`\w+`(?:, and |, | and )?)+)", re.MULTILINE)


def test_all_kernels():
    """Each kernel that a file launches, or names in its docstring, is searched."""
    searched = set().union(*(kernels for _, kernels in CASES.values()))
    package, named = Path(launch.__file__).parents[1], set()
    own_rooms = ("hopper", "triton")
    files = [path for path in package.rglob("*.py") if path.parent.name not in own_rooms]
    launching = [path for path in files if LAUNCH.search(path.read_text())]
    assert len(launching) == 24
    for path in launching:
        own = NAME.findall(path.read_text())
        for names in HEADER.findall(path.read_text()):
            own += re.findall(r"\w+(?=`)", names)
        assert own, f"{path} names no kernel"
        named |= set(own)
    assert named == searched
