"""The Triton kernels run: in Triton's interpreter where there is no GPU, compiled where there is one."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_jax import kernels
from moe_jax.kernels.experts import triton as ours
from moe_jax.kernels.experts import xla
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.low_rank import LowRank, RowsChange
from tests.helpers.expert_layers import (
    Adapter,
    adapted,
    assert_as_near_as,
    choose,
    chosen_so_often,
    few_bits,
    make_layer,
    relative_error,
    types_of,
    with_gradients,
)
from tests.helpers.triton_without_gpu import compiled_without_spills, needs_triton, pretend_hopper, recorded_calls
from tests.kernels.experts.test_triton import QWEN3_30B, layer_shapes, step, step_with_totals

ROUTINGS = ["random", "one_takes_all", "half_empty", "some_nobody", "nobody"]


SIZES = [
    (37, 4, 2, 128, 128, "bfloat16"),
    (140, 2, 1, 128, 128, "float16"),
    (50, 3, 2, 40, 24, "bfloat16"),
    (75, 2, 1, 72, 100, "float32"),
    (1, 6, 3, 64, 5, "float32"),
]
COMPARED = [(routing, *SIZES[0]) for routing in ("one_takes_all", "nobody")] + [("some_nobody", *SIZES[i]) for i in (1, 3)]
OTHERS = [case for sizes in SIZES for routing in ROUTINGS if (case := (routing, *sizes)) not in COMPARED]


@needs_triton
@pytest.mark.parametrize(
    "routing, tokens, experts, k, hidden, inter, dtype",
    [*COMPARED, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)],
)
def test_values_and_gradients_are_as_near_f64_as_xla(rng, runs, routing, tokens, experts, k, hidden, inter, dtype):
    layer = make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype)
    dy = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    actuals = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="triton"), layer, dy)
    others = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="xla"), layer, dy)
    assert_as_near_as(actuals, others, layer, dy, few=1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize(
    "tokens, experts, k, hidden, inter, row_alignment",
    [
        (0, 3, 2, 64, 128, 64),
        (150, 1, 1, 64, 128, 1),
        (40, 7, 3, 20, 72, 3),
        (50, 2, 2, 256, 256, 64),
    ],
    ids=["no tokens", "several tiles of one expert", "a part of a tile an expert", "several tiles a row"],
)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(routing=st.sampled_from(ROUTINGS), seed=st.integers(0, 2**31))
def test_every_matmul_is_that_of_the_xla_backend(runs, tokens, experts, k, hidden, inter, row_alignment, routing, seed):
    """Rows of no pair hold NaN wherever the interface allows any value. Some rows have no source."""
    rng = np.random.default_rng(seed)
    rows = plan(jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32), experts, row_alignment)
    owned = np.asarray(rows.pair_of_row) < rows.row_of_pair.size
    owned &= np.arange(rows.num_rows) < int(rows.offsets[-1])
    source = jnp.where(rng.random(rows.num_rows) < 0.1, tokens + 3, rows.token_of_row)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.bfloat16)

    x, act, h = normal(tokens, hidden), normal(rows.num_rows, inter), normal(rows.num_rows, 2 * inter)
    w_gate_up, w_down = normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)
    v = jnp.asarray(rng.random(rows.num_rows), jnp.float32)
    before = -w_down.astype(jnp.float32)

    arrays = rows, source, owned, x, (act, h, v), w_gate_up, w_down, before
    results = all_matmuls(ours, math.nan, *arrays)
    np.testing.assert_array_equal(results[2], results[1])
    np.testing.assert_array_equal(results[-1], before + results[-3])
    for actual, expected in zip(results, all_matmuls(xla, 0, *arrays), strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 6e-3
    for without_rows in np.flatnonzero(np.asarray(rows.ends) == np.asarray(rows.offsets[:-1])):
        assert all(not np.asarray(dw[without_rows]).any() for dw in results[-3:-1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def all_matmuls(module, nothing, rows, source, owned, x, of_rows, w_gate_up, w_down, before):
    """Returns six products by rows, zero where a row is nobody's, and three by experts. Compiled once a shape."""

    def where_owned(a, other):
        return jnp.where(owned.reshape(-1, *[1] * (a.ndim - 1)), a, other)

    act, h, v = (where_owned(a, nothing) for a in of_rows)
    by_rows = (
        *module.gated_matmul(x, w_gate_up, rows, source_of_row=source),
        module.gated_matmul(x, w_gate_up, rows, source_of_row=source, keep_h=False)[1],
        module.grouped_matmul(act, w_down, rows),
        module.grouped_matmul(x, w_down, rows, source_of_row=source, transpose=True),
        *module.gated_matmul_backward(x, w_down, h, v, rows, source_of_row=source),
    )
    return [where_owned(a, 0) for a in by_rows] + [
        module.grouped_outer(x, act, rows, jnp.float32, a_source_of_row=source),
        module.grouped_outer(h, x, rows, jnp.bfloat16, b_source_of_row=source),
        module.grouped_outer(x, act, rows, jnp.float32, a_source_of_row=source, accumulate_into=before),
    ]


@needs_triton
def test_the_bits_of_a_token_do_not_depend_on_the_other_tokens(rng, runs):
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 220, 4, 3, 128, 128)
    weights = few_bits(weights)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def run(count):
        layer = (x[:count], w_gate_up, w_down, weights[:count], chosen[:count])
        y, dx, _, _, d_weights = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="triton"), layer, dy[:count])
        return y, dx, d_weights

    among_others = run(220)
    for tokens in (1, 7):
        for alone, of_all in zip(run(tokens), among_others, strict=True):
            np.testing.assert_array_equal(alone, of_all[:tokens])


@needs_triton
@pytest.mark.parametrize(
    "dtype, ranks, error",
    [
        ("float32", (3, 20), 1e-5),
        pytest.param("bfloat16", (70, 16), 2e-2, marks=pytest.mark.thorough),
    ],
)
def test_low_rank_changes(rng, runs, dtype, ranks, error):
    """The result and every gradient equal the changed matrices'. Ranks are filled up; sizes end within tiles or do not."""
    experts, hidden, inter = 3, *((40, 24) if dtype == "float32" else (128, 256))
    x, *matrices, weights, chosen = make_layer(rng, "some_nobody", 75, experts, 2, hidden, inter, "float32")
    shapes = (experts, ranks[0], hidden), (1, 2 * inter, ranks[0]), (experts, ranks[1], inter), (experts, hidden, ranks[1])
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * shape[2] ** -0.5, jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def ours_of(x, weights, adapter):
        frozen = [matrix.astype(dtype) for matrix in matrices]
        return adapted(x.astype(dtype), *frozen, weights, chosen, adapter, backend="triton").astype(jnp.float32)

    def plain(x, weights, adapter):
        changed = [w + jnp.matmul(*reversed(factors)) for w, factors in zip(matrices, adapter, strict=True)]
        return kernels.experts_mlp(x, *changed, weights, chosen, backend="xla")

    def leaves(f):
        y, pullback = jax.vjp(f, x, weights, Adapter(LowRank(a1, b1), LowRank(a2, b2)))
        return jax.tree.leaves((y, pullback(dy)))

    for actual, expected in zip(leaves(ours_of), leaves(plain), strict=True):
        assert relative_error(actual, expected) < error


@pytest.mark.thorough
@needs_triton
def test_a_change_of_zero_changes_no_bit(rng, runs):
    """Rows without a source yield zeros with a change, too."""
    x, w_gate_up, w_down, _, chosen = make_layer(rng, "random", 60, 2, 1, 128, 64)
    rows = plan(chosen, 2)
    source = rows.token_of_row.at[3].set(99)
    change = RowsChange(jnp.asarray(rng.normal(size=(60, 16)), x.dtype), jnp.zeros((2, 128, 16), x.dtype))
    for options in ({}, {"change": change}):
        h, act = ours.gated_matmul(x, w_gate_up, rows, source_of_row=source, **options)
        y = ours.grouped_matmul(act, w_down, rows, **options)
        if not options:
            expected = h, act, y
    for actual, wanted in zip((h, act, y), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert not np.asarray(h[3]).any()


@needs_triton
def test_f32_master_weights_get_f32_gradients_rounded_once(rng, runs):
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 100, 2, 1, 64, 128)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def weight_gradients(dtype):
        layer = (x, w_gate_up.astype(dtype), w_down.astype(dtype), weights, chosen)
        return with_gradients(lambda *a: kernels.experts_mlp(*a, backend="triton"), layer, dy)[2:4]

    for wide, rounded in zip(weight_gradients(jnp.float32), weight_gradients(jnp.bfloat16), strict=True):
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(wide.astype(jnp.bfloat16), rounded)


@needs_triton
@pytest.mark.thorough
def test_a_chunked_call_gives_the_same(rng, runs):
    layer = make_layer(rng, "random", 50, 4, 2, 64, 64)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    whole, chunked = (
        with_gradients(lambda *a, size=size: kernels.experts_mlp(*a, backend="triton", chunk_tokens=size), layer, dy)
        for size in (None, 16)
    )
    for one, other in zip(whole, chunked, strict=True):
        assert relative_error(one, other) < 4e-3


@needs_triton
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=8, max_size=8), st.sampled_from([64, 128]), st.sampled_from([1, 64]))
def test_row_tiles_cover_each_experts_pairs_once(counts, height, row_alignment):
    by_rows = importlib.import_module("moe_jax.kernels.experts.triton.by_rows")
    rows = plan(chosen_so_often(counts, 3200), len(counts), row_alignment)
    expert, first, end, count = map(np.asarray, by_rows.row_tiles(rows, height))
    tiles = list(zip(expert, first, end, strict=True))[: count[0]]
    covered = [(e, row) for e, start, stop in tiles for row in range(start, stop)]
    offsets, ends = np.asarray(rows.offsets), np.asarray(rows.ends)
    assert covered == [(e, row) for e in range(len(counts)) for row in range(offsets[e], ends[e])]
    assert len(tiles) == count[0] and all(stop - start <= height for _, start, stop in tiles)


@needs_triton
@pytest.mark.parametrize(
    "tokens, capability",
    [
        pytest.param(100, "9.0", marks=pytest.mark.thorough),
        (32768, "8.0"),
        *(pytest.param(32768, capability, marks=pytest.mark.thorough) for capability in ("8.9", "9.0", "10.0")),
    ],
)
def test_kernels_compile_without_register_spills(monkeypatch, tmp_path, tokens, capability):
    """Triton brings its own assembler; no GPU is needed. Compiles for each architecture."""
    pretend_hopper(monkeypatch, capability)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    calls = recorded_calls(monkeypatch)
    jax.clear_caches()
    shapes = layer_shapes(tokens, **QWEN3_30B)
    jax.eval_shape(step, *shapes)
    jax.eval_shape(step_with_totals, tuple(jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in shapes[1:3]), *shapes)
    jax.clear_caches()
    assert sum(call.options.get("accumulates", False) for call in calls) == 2
    names = {"gated_matmul", "grouped_matmul", "gated_matmul_backward", "grouped_outer"}
    assert {call.options["name"] for call in calls} == names
    for call in calls:
        instruction = {"8": "mma.sync", "9": "wgmma.mma_async", "1": "tcgen05.mma"}[capability[0]]
        assert instruction in compiled_without_spills(call, capability, tmp_path), call.options["kernel"].__name__


@needs_triton
@pytest.mark.thorough
@pytest.mark.parametrize("capability, rank", [("9.0", 4), ("8.0", 32), ("8.9", 128), ("9.0", 64), ("10.0", 16)])
def test_changed_kernels_compile(monkeypatch, tmp_path, capability, rank):
    """A change has its steps in the matmuls of its matrix: 12 kernels, eight of them the low-rank products."""
    pretend_hopper(monkeypatch, capability)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    calls = recorded_calls(monkeypatch)
    experts, k, hidden, inter = QWEN3_30B.values()
    shapes = (experts, rank, hidden), (experts, 2 * inter, rank), (experts, rank, inter), (experts, hidden, rank)
    a1, b1, a2, b2 = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    x, *matrices, weights, chosen = types_of(8192, experts, k, hidden, inter)

    def gradient(x, matrices, weights, adapter, chosen):
        def f(x, weights, adapter):
            return adapted(x, *matrices, weights, chosen, adapter, backend="triton")

        y, pullback = jax.vjp(f, x, weights, adapter)
        return y, pullback(y)

    jax.clear_caches()
    jax.eval_shape(gradient, x, matrices, weights, Adapter(LowRank(a1, b1), LowRank(a2, b2)), chosen)
    jax.clear_caches()
    changed = [call for call in calls if call.options.get("rank")]
    # JAX also traces the forward pass alone, which is four of the kernels.
    assert len(calls) == 12 + 4 and len(changed) == 4 + 2
    for call in changed:
        compiled_without_spills(call, capability, tmp_path)


@needs_triton
def test_results_of_sharded_tokens_vary_over_devices(runs):
    """Otherwise shard_map would silently drop the sum over devices from the gradient of weights, or accept such an output."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = jnp.ones((3, 8)), jnp.ones((2, 8, 8))
    rows = plan(jnp.zeros((3, 1), jnp.int32), 2)
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(
            lambda x: ours.grouped_matmul(x, w, rows),
            mesh=mesh,
            in_specs=jax.sharding.PartitionSpec("data"),
            out_specs=jax.sharding.PartitionSpec(),
        )(x)


@pytest.mark.gpu
@pytest.mark.skipif(not ours.is_native(), reason="needs an NVIDIA GPU from Ampere on, triton and jax_triton")
@pytest.mark.parametrize("tokens, rank", [(129, 4), (8192, 64)])
def test_adapted_experts_on_the_gpu(rng, tokens, rank):
    """The result and every gradient are close to the xla backend's, and a second run repeats their bits."""
    experts, k, hidden, inter = QWEN3_30B.values()
    x, *matrices, weights, chosen = make_layer(rng, "random", tokens, experts, k, hidden, inter)
    shapes = (experts, rank, hidden), (experts, 2 * inter, rank), (experts, rank, inter), (experts, hidden, rank)
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * shape[2] ** -0.5, jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def leaves(backend, matrices, *arguments):
        def f(x, weights, adapter):
            return adapted(x, *matrices, weights, chosen, adapter, backend=backend)

        y, pullback = jax.vjp(f, *arguments)
        return jax.tree.leaves((y, pullback(dy)))

    arguments = matrices, x, weights, Adapter(LowRank(a1, b1), LowRank(a2, b2))
    first, again, others = leaves("triton", *arguments), leaves("triton", *arguments), leaves("xla", *arguments)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    for actual, expected in zip(first, others, strict=True):
        assert relative_error(actual, expected) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not ours.is_native(), reason="needs an NVIDIA GPU from Ampere on, triton and jax_triton")
@pytest.mark.parametrize("tokens", [1, 129, 8192])
def test_a_layer_of_qwen3_30b_on_the_gpu(rng, tokens):
    """The result is near that of the xla backend, and a second run repeats its bits."""
    layer = make_layer(rng, "random", tokens, **{name: QWEN3_30B[name] for name in ("experts", "k", "hidden", "inter")})
    dy = jnp.asarray(rng.normal(size=(tokens, 2048)), jnp.bfloat16)

    def run(name):
        return jax.jit(lambda *layer: with_gradients(lambda *a: kernels.experts_mlp(*a, backend=name), layer, dy))(*layer)

    first, again, others = run("triton"), run("triton"), run("xla")
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    for actual, expected in zip(first, others, strict=True):
        assert relative_error(actual, expected) < 1e-2
