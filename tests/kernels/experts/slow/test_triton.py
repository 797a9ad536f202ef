"""The Triton kernels run: in Triton's interpreter where there is no GPU, compiled where there is one."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax import kernels
from moe_jax.kernels.experts import triton as ours
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.low_rank import LowRank
from tests.helpers.expert_layers import (
    Adapter,
    adapted,
    assert_as_near_as,
    chosen_so_often,
    few_bits,
    make_layer,
    relative_error,
    types_of,
    with_gradients,
)
from tests.helpers.triton_without_gpu import compiled_without_spills, needs_triton, pretend_hopper, recorded_calls
from tests.kernels.experts.test_activation import CLAMPED
from tests.kernels.experts.test_triton import QWEN3_30B, layer_shapes, step, step_with_totals

COMPARED = ("one_takes_all", 37, 4, 2, 128, 128, "bfloat16"), ("some_nobody", 75, 2, 1, 72, 100, "float32")
OTHERS = [
    ("some_nobody", 140, 2, 1, 128, 128, "float16"),
    ("half_empty", 50, 3, 2, 40, 24, "bfloat16"),
    ("random", 1, 6, 3, 64, 5, "float32"),
    ("nobody", 37, 4, 2, 128, 128, "bfloat16"),
]


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


@needs_triton
def test_the_bits_of_a_token_do_not_depend_on_the_other_tokens(rng, runs):
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 140, 2, 2, 128, 128)
    weights = few_bits(weights)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def run(count):
        layer = (x[:count], w_gate_up, w_down, weights[:count], chosen[:count])
        y, dx, _, _, d_weights = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="triton"), layer, dy[:count])
        return y, dx, d_weights

    for alone, of_all in zip(run(7), run(140), strict=True):
        np.testing.assert_array_equal(alone, of_all[:7])


@needs_triton
def test_low_rank_changes(rng, runs):
    """The result and every gradient equal the changed matrices'. Ranks are filled up, and sizes end within tiles."""
    ranks, experts, hidden, inter = (3, 20), 3, 40, 24
    x, *matrices, weights, chosen = make_layer(rng, "some_nobody", 40, experts, 2, hidden, inter, "float32")
    shapes = (experts, ranks[0], hidden), (1, 2 * inter, ranks[0]), (experts, ranks[1], inter), (experts, hidden, ranks[1])
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * shape[2] ** -0.5, jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def ours_of(x, weights, adapter):
        return adapted(x, *matrices, weights, chosen, adapter, backend="triton")

    def plain(x, weights, adapter):
        changed = [w + jnp.matmul(*reversed(factors)) for w, factors in zip(matrices, adapter, strict=True)]
        return kernels.experts_mlp(x, *changed, weights, chosen, backend="xla")

    @functools.partial(jax.jit, static_argnums=0)
    def leaves(f, *arrays):
        y, pullback = jax.vjp(f, *arrays)
        return jax.tree.leaves((y, pullback(dy)))

    arrays = x, weights, Adapter(LowRank(a1, b1), LowRank(a2, b2))
    for actual, expected in zip(leaves(ours_of, *arrays), leaves(plain, *arrays), strict=True):
        assert relative_error(actual, expected) < 1e-5


@needs_triton
def test_f32_master_weights_get_f32_gradients_rounded_once(rng, runs):
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 40, 2, 1, 64, 128)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def weight_gradients(dtype):
        layer = (x, w_gate_up.astype(dtype), w_down.astype(dtype), weights, chosen)
        return with_gradients(lambda *a: kernels.experts_mlp(*a, backend="triton"), layer, dy)[2:4]

    for wide, rounded in zip(weight_gradients(jnp.float32), weight_gradients(jnp.bfloat16), strict=True):
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(wide.astype(jnp.bfloat16), rounded)


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
    if capability == "9.0":
        biases = tuple(jax.ShapeDtypeStruct((128, size), jnp.bfloat16) for size in (1536, 2048))
        jax.eval_shape(functools.partial(step, activation=CLAMPED), *shapes, biases)
    jax.clear_caches()
    assert any(call.options.get("biased") for call in calls) == (capability == "9.0")
    assert sum(call.options.get("accumulates", False) for call in calls) == 2
    names = {"gated_matmul", "grouped_matmul", "gated_matmul_backward", "grouped_outer"}
    assert {call.options["name"] for call in calls} == names
    for call in calls:
        instruction = {"8": "mma.sync", "9": "wgmma.mma_async", "1": "tcgen05.mma"}[capability[0]]
        assert instruction in compiled_without_spills(call, capability, tmp_path), call.options["kernel"].__name__


@needs_triton
@pytest.mark.thorough
@pytest.mark.parametrize("capability, rank", [("9.0", 4), ("8.9", 128), ("10.0", 16)])
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
