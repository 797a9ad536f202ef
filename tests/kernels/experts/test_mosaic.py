"""The Hopper kernels, in JAX's GPU interpreter where there is no GPU, compiled where there is one."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_layers import (
    assert_as_near_as,
    choose,
    exact_with_gradients,
    few_bits,
    gradients_by_accumulators,
    gradients_by_tickets,
    gradients_in_a_stack,
    make_layer,
    relative_error,
    types_of,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from lowered import lowered_for_h200, num_kernels

from moe_jax import kernels
from moe_jax.kernels.experts import mosaic, xla
from moe_jax.kernels.experts.backends import OuterPart, grouped_outer_of_parts
from moe_jax.kernels.experts.internal import Accumulators, TokenPart, experts_mlp_accumulating, experts_mlp_of_parts
from moe_jax.kernels.experts.mosaic import tile_order
from moe_jax.kernels.experts.routing import plan

ROUTINGS = ["random", "one_takes_all", "half_empty", "some_nobody"]


SMALL = 37, 4, 2, 128, 128
"""Tokens, experts, k, hidden, inter: where one size is as good as another, what is traced for it serves several tests."""


@pytest.mark.parametrize(
    "routing, tokens, experts, k, hidden, inter, dtype",
    [
        ("one_takes_all", *SMALL, "bfloat16"),
        ("some_nobody", *SMALL, "bfloat16"),
        *(pytest.param(routing, *SMALL, "bfloat16", marks=pytest.mark.thorough) for routing in ("random", "half_empty")),
        pytest.param("half_empty", 129, 2, 1, 64, 128, "float16", marks=pytest.mark.thorough),
        pytest.param("random", 170, 1, 1, 192, 256, "bfloat16", marks=pytest.mark.thorough),
        pytest.param("some_nobody", 1, 6, 3, 256, 192, "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_values_and_gradients(rng, routing, tokens, experts, k, hidden, inter, dtype):
    """Errors against f64 are as small as the xla backend's."""
    layer = make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype)
    dy = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    ours = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    theirs = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="xla"), layer, dy)
    assert_as_near_as(ours, theirs, layer, dy, few=3e-2)


def test_between_gate_up_and_down(rng):
    """A function between `gate_up` and `down` gets gradients of the rows of pairs only."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "some_nobody", *SMALL)
    rows = plan(chosen, SMALL[1], mosaic.ROW_ALIGNMENT)

    def loss(slope, backend):
        gate, up = jnp.split(kernels.gate_up(x, w_gate_up, rows, backend=backend), 2, axis=1)
        act = (jax.nn.silu(slope * gate.astype(jnp.float32)) * up).astype(x.dtype)
        return jnp.square(kernels.down(act, w_down, weights, rows, backend=backend).astype(jnp.float32)).sum()

    ours, theirs = (jax.grad(loss)(1.1, backend) for backend in ("mosaic", "xla"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)


def in_room(max_pairs, x, w_gate_up, w_down, weights, chosen):
    """The experts of all tokens as one part, with room for max_pairs of their choices."""
    part = TokenPart(x, weights, chosen)
    return experts_mlp_of_parts([part], w_gate_up, w_down, backend="mosaic", max_pairs=[max_pairs])[0]


@pytest.mark.thorough
def test_max_pairs(rng):
    """Room for fewer rows, if most experts live elsewhere, changes no bit."""
    tokens, here, k, hidden, _ = SMALL
    *arrays, _ = make_layer(rng, "random", *SMALL)
    chosen = jnp.asarray(choose(rng, "random", tokens, 4 * here, k), jnp.int32)
    layer = *arrays, chosen
    dy = jnp.asarray(rng.normal(size=(tokens, hidden)), jnp.bfloat16)
    in_range = int((chosen < here).sum())
    ours = with_gradients(lambda *a: in_room(in_range, *a), layer, dy)
    theirs = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "routing", ["some_nobody", *(pytest.param(each, marks=pytest.mark.thorough) for each in ROUTINGS if each != "some_nobody")]
)
def test_outer_of_parts(rng, routing):
    """The products of parts equal the product of all their rows."""
    parts = []
    for _ in range(3):
        rows = plan(jnp.asarray(choose(rng, routing, 50, 4, 2), jnp.int32), 4, mosaic.ROW_ALIGNMENT)
        has_pair = np.asarray(rows.pair_of_row)[:, None] < rows.row_of_pair.size
        a, b = (jnp.asarray(has_pair * rng.normal(size=(rows.num_rows, width)), jnp.bfloat16) for width in (128, 64))
        parts.append(OuterPart(a, b, rows))
    ours = grouped_outer_of_parts("mosaic", parts, jnp.float32)
    assert relative_error(ours, grouped_outer_of_parts("xla", parts, jnp.float32)) < 1e-5


@pytest.mark.parametrize(
    "tokens, experts, k",
    [(0, 3, 2), *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((90, 2, 1), (40, 7, 3)))],
    ids=["no tokens", "several blocks an expert", "a block an expert"],
)
@settings(max_examples=3, deadline=None)
@given(routing=st.sampled_from(ROUTINGS), seed=st.integers(0, 2**31))
@pytest.mark.long
def test_three_matmuls(tokens, experts, k, routing, seed):
    """On the same plan they equal the xla backend's, and rows of nobody give zeros."""
    rng = np.random.default_rng(seed)
    rows = plan(jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32), experts, mosaic.ROW_ALIGNMENT)
    x, dh = (jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16) for width in (64, 128))
    w = jnp.asarray(rng.normal(size=(experts, 128, 64)), jnp.bfloat16)
    owned = np.asarray(rows.pair_of_row) < rows.row_of_pair.size
    owned &= np.arange(rows.num_rows) < int(rows.offsets[-1])

    for actual, expected in zip(*(all_three(backend, rows, owned, x, dh, w) for backend in (mosaic, xla)), strict=True):
        assert relative_error(actual, expected) < 1e-3
        assert not np.asarray(actual)[~np.asarray(expected).any(axis=tuple(range(1, np.ndim(expected))))].any()


@partial(jax.jit, static_argnums=0)
def all_three(backend, rows, owned, x, dh, w):
    """Returns two products by rows, zero where a row is nobody's, and one by experts. Compiled once a shape."""
    x_rows, source = backend.rows_of_tokens(x, rows)
    dh_rows, dh_source = backend.rows_of_tokens(dh, rows)
    return (
        jnp.where(owned[:, None], backend.grouped_matmul(x_rows, w, rows, source_of_row=source), 0),
        jnp.where(owned[:, None], backend.grouped_matmul(dh_rows, w, rows, source_of_row=dh_source, transpose=True), 0),
        backend.grouped_outer(dh_rows, x_rows, rows, jnp.float32, a_source_of_row=dh_source, b_source_of_row=source),
    )


@pytest.mark.parametrize(
    "routing, tokens, experts, k, m, n",
    [
        ("one_takes_all", 130, 2, 1, 128, 128),
        pytest.param("random", 70, 3, 2, 64, 256, marks=pytest.mark.thorough),
        pytest.param("half_empty", 3, 4, 1, 256, 64, marks=pytest.mark.thorough),
    ],
)
def test_outer_accumulates(rng, routing, tokens, experts, k, m, n):
    """A sum by experts is added to the accumulator; experts without rows keep every bit."""
    rows = plan(jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32), experts, mosaic.ROW_ALIGNMENT)
    a, b = (jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16) for width in (m, n))
    before = rng.normal(size=(experts, m, n)).astype(np.float32)
    before[:, 0, 0] = -0.0  # Which adding 0 would turn into 0.
    sources = {"a_source_of_row": rows.token_of_row, "b_source_of_row": rows.token_of_row}
    alone = mosaic.grouped_outer(a, b, rows, jnp.float32, **sources)
    total = np.asarray(mosaic.grouped_outer(a, b, rows, jnp.float32, **sources, accumulate_into=jnp.asarray(before)))
    has_rows = np.diff(rows.offsets) > 0
    np.testing.assert_array_equal(total[has_rows], before[has_rows] + np.asarray(alone)[has_rows])
    np.testing.assert_array_equal(total[~has_rows].view(np.int32), before[~has_rows].view(np.int32))


def test_weight_gradients_multiplied_later(rng):
    """They have the bits of gradients added to accumulators, and so have y and the other gradients."""
    layer = make_layer(rng, "some_nobody", *SMALL)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    found, expected = (
        jax.jit(f, static_argnums=0)("mosaic", layer, dy) for f in (gradients_by_tickets, gradients_by_accumulators)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_layer_of_a_stack(rng):
    """Kernels read a layer's weights inside a stack and add to its sums there: the same bits, and other layers' sums stay."""
    layer = make_layer(rng, "half_empty", *SMALL)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    expected = jax.jit(gradients_by_accumulators, static_argnums=0)("mosaic", layer, dy)
    found, of_others = jax.jit(gradients_in_a_stack, static_argnums=0)("mosaic", layer, dy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for before, after in of_others:
        assert (before == -1).all() and (after == 1).all()


def test_accumulators_of_micro_batches(rng):
    """Accumulators grow by the gradients of every chunk."""
    layer = make_layer(rng, "half_empty", 2 * SMALL[0] - 4, *SMALL[1:])
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    totals = tuple(jnp.asarray(rng.normal(size=w.shape), jnp.float32) for w in layer[1:3])

    def with_totals(x, weights):
        def f(x, weights, totals):
            how = {"backend": "mosaic", "chunk_tokens": SMALL[0]}
            return experts_mlp_accumulating(x, *layer[1:3], weights, layer[4], Accumulators(*totals), **how)

        y, pullback = jax.vjp(f, x, weights, totals)
        dx, d_weights, after = pullback(dy)
        return y, dx, *after, d_weights

    y, dx, *after, d_weights = jax.jit(with_totals)(layer[0], layer[3])
    exact = exact_with_gradients(layer, dy)
    for actual, expected in zip((y, dx, d_weights), (exact[0], exact[1], exact[4]), strict=True):
        assert relative_error(actual, expected) < 1e-2
    for total, before, expected in zip(after, totals, exact[2:4], strict=True):
        assert relative_error(np.asarray(total, np.float64) - before, expected) < 1e-2
        np.testing.assert_array_equal(total[2:], before[2:])


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.thorough), 7])
def test_bits_of_a_token(rng, tokens):
    """They do not depend on the other tokens."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", *SMALL)
    weights = few_bits(weights)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def run(count):
        layer = (x[:count], w_gate_up, w_down, weights[:count], chosen[:count])
        y, dx, _, _, d_weights = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy[:count])
        return y, dx, d_weights

    for alone, of_all in zip(run(tokens), run(SMALL[0]), strict=True):
        np.testing.assert_array_equal(alone, of_all[:tokens])


@pytest.mark.thorough
def test_two_runs_give_the_same_bits(rng):
    layer = make_layer(rng, "random", *SMALL)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    runs = [with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.thorough
def test_order_of_tiles(rng, monkeypatch):
    """One and three rows of tiles an expert, and several columns; as for large matrices, two rows go through them together."""
    *arrays, _ = make_layer(rng, "random", 320, 2, 1, 384, 128)
    layer = *arrays, jnp.asarray(np.arange(320)[:, None] >= 60, jnp.int32)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)

    def run():
        return with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)

    row_after_row = run()
    monkeypatch.setattr(tile_order, "SMALL_MATRIX_BYTES", 0)
    monkeypatch.setattr(tile_order, "GROUP", 2)
    # Another precision of f32 products makes JAX trace again. There are no f32 products here.
    with jax.default_matmul_precision("high"):
        for actual, expected in zip(run(), row_after_row, strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.thorough
def test_f32_master_weights(rng):
    """f32 weights get f32 gradients that were not rounded before."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", *SMALL)
    layer = (x, w_gate_up.astype(jnp.float32), w_down.astype(jnp.float32), weights, chosen)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    _, _, d_gate_up, d_down, _ = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    _, _, rounded_gate_up, rounded_down, _ = with_gradients(
        lambda *a: kernels.experts_mlp(*a, backend="mosaic"), (x, w_gate_up, w_down, weights, chosen), dy
    )
    assert d_gate_up.dtype == d_down.dtype == jnp.float32
    np.testing.assert_array_equal(d_gate_up.astype(jnp.bfloat16), rounded_gate_up)
    np.testing.assert_array_equal(d_down.astype(jnp.bfloat16), rounded_down)


def test_without_h(rng):
    """A forward pass alone, and the first of two under `jax.checkpoint`, which JAX does not interpret."""
    *arrays, chosen = make_layer(rng, "some_nobody", *SMALL)
    dy = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.bfloat16)

    def layer(*arrays):
        return kernels.experts_mlp(*arrays, chosen, backend="mosaic")

    y, *gradients = with_gradients(lambda *a: layer(*a[:-1]), (*arrays, chosen), dy)
    np.testing.assert_array_equal(layer(*arrays), y)
    if mosaic.is_native():
        with_remat = with_gradients(lambda *a: jax.checkpoint(layer)(*a[:-1]), (*arrays, chosen), dy)
        for actual, expected in zip(with_remat, (y, *gradients), strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("routing", ["random", pytest.param("one_takes_all", marks=pytest.mark.thorough)])
def test_gather_where_used(rng, routing):
    """A forward pass alone gathers them in its first matmul. Tokens that choose nobody reach no row."""
    # Enough tokens that each of a GPU's blocks has several tiles.
    tokens, hidden, inter = (20000, 1024, 384) if mosaic.is_native() else (150, 192, 128)
    x, w_gate_up, _, _, chosen = make_layer(rng, routing, tokens, 5, 2, hidden, inter)
    x, chosen = x.at[-1].set(jnp.nan), chosen.at[-1].set(-1)
    rows = plan(chosen, 5, mosaic.ROW_ALIGNMENT)
    gathered, _ = mosaic.rows_of_tokens(x, rows)
    where_used, source = mosaic.rows_of_tokens(x, rows, for_gradients=False)
    assert where_used is x
    _, before = mosaic.gated_matmul(gathered, w_gate_up, rows, keep_h=False)
    h, act = mosaic.gated_matmul(where_used, w_gate_up, rows, source_of_row=source, keep_h=True)
    _, alone = mosaic.gated_matmul(where_used, w_gate_up, rows, source_of_row=source, keep_h=False)
    computed = int(rows.offsets[-1])
    for actual in (act, alone):
        np.testing.assert_array_equal(actual[:computed], before[:computed])
    assert np.isfinite(np.asarray(h[:computed], np.float32)).all()


@pytest.mark.parametrize(
    "routing",
    [pytest.param(each, marks=pytest.mark.smoke if each == "half_empty" else pytest.mark.thorough) for each in ROUTINGS],
)
def test_few_tokens_are_not_gathered(rng, routing):
    """Up to 64 tokens are read where they are, in a forward pass alone. The first token chooses one expert three times.

    A CPU rounds some sums by where a row stands in a tile.
    """
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, routing, 70, 5, 3, 128, 64)
    weights, chosen = few_bits(weights), chosen.at[0].set(chosen[0, 0])

    def run(count):
        return kernels.experts_mlp(x[:count], w_gate_up, w_down, weights[:count], chosen[:count], backend="mosaic")

    gathered = run(70)
    for tokens in (9, 64):
        if mosaic.is_native():
            np.testing.assert_array_equal(run(tokens), gathered[:tokens])
        assert relative_error(run(tokens), gathered[:tokens]) < 3e-3


@pytest.mark.parametrize(
    "tokens, max_pairs, blocks",
    [
        (64, None, 4),
        (65, None, 6),
        (64, 127, 6),
        pytest.param(1, None, 2, marks=pytest.mark.thorough),
        pytest.param(64, 128, 4, marks=pytest.mark.thorough),
    ],
)
def test_rows_of_up_to_64_tokens(tokens, max_pairs, blocks):
    """Unless there is no room for all that they choose. A forward pass gathers rows in its first matmul and is two kernels."""

    def layer(x, w_gate_up, w_down, weights, chosen):
        return in_room(max_pairs, x, w_gate_up, w_down, weights, chosen)

    lowered = lowered_for_h200(layer, *types_of(tokens, 4, 2, 256, 320))
    assert num_kernels(lowered) == 2
    # One more block is kept free.
    assert f"-> tensor<{(blocks + 1) * 64}x320xbf16>" in lowered


def test_h_is_written_for_gradients():
    """A forward pass alone does not write h."""

    def layer(x, w_gate_up, w_down, weights, chosen):
        return kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen, backend="mosaic")

    def gradients(layer):
        return jax.grad(lambda *a: jnp.square(layer(*a).astype(jnp.float32)).sum(), argnums=(0, 1, 2, 3))

    def kernels_that_write_h_and_act(f):
        lowered = lowered_for_h200(f, *types_of(100, 4, 2, 256, 320))
        calls = [line.rpartition("->")[2] for line in lowered.splitlines() if "custom_call @mosaic_gpu" in line]
        return [sum(bool(re.search(rf"tensor<\d+x{columns}xbf16>", results)) for results in calls) for columns in (640, 320)]

    assert kernels_that_write_h_and_act(layer) == [0, 1]
    # Beside h and act there are the gradient of h and the weighted act.
    assert kernels_that_write_h_and_act(gradients(layer)) == [2, 2]
    assert kernels_that_write_h_and_act(gradients(jax.checkpoint(layer))) == [2, 3]


LAYERS = (128, 8, 2048, 768), (128, 8, 4096, 1536), (256, 8, 7168, 2048), (8, 2, 4096, 14336), (64, 6, 2048, 1408)


@pytest.mark.parametrize(
    "tokens, experts, k, hidden, inter",
    [
        (65536, 256, 8, 7168, 2048),
        *(pytest.param(100, *layer, marks=pytest.mark.thorough) for layer in ((3, 1, 64, 384), (4, 2, 384, 128))),
        *(pytest.param(tokens, *layer, marks=pytest.mark.thorough) for tokens in (1, 100) for layer in LAYERS),
        *(pytest.param(65536, *layer, marks=pytest.mark.thorough) for layer in LAYERS if layer[2] != 7168),
    ],
)
def test_real_layers_lower_for_an_h200(tokens, experts, k, hidden, inter):
    def step(x, w_gate_up, w_down, weights, chosen, dy):
        y, pullback = jax.vjp(lambda *a: kernels.experts_mlp(*a, chosen, backend="mosaic"), x, w_gate_up, w_down, weights)
        return y, pullback(dy)

    types = types_of(tokens, experts, k, hidden, inter)
    lowered = lowered_for_h200(step, *types, types[0])
    assert num_kernels(lowered) == 9, "two gathers and four matmuls backward, one and two forward"


def test_lowers_for_an_h200_with_x64():
    """Covers jax_enable_x64 too, and the smallest width."""

    def step(x, w_gate_up, w_down, weights, chosen):
        def loss(*arrays):
            return kernels.experts_mlp(*arrays, chosen, backend="mosaic").astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, w_gate_up, w_down, weights)

    with jax.enable_x64(True):
        assert num_kernels(lowered_for_h200(step, *types_of(300, 3, 1, 64, 384))) > 5


@pytest.mark.parametrize("check_vma", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_accumulators_in_place_on_h200(check_vma):
    """Two devices have accumulators of their own. Neither is copied, since the kernels' results take their memory."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    tokens, experts, k, hidden, inter = 8192, 128, 8, 2048, 768

    def totals_after(totals, x, w_gate_up, w_down, weights, chosen):
        def loss(totals):
            arrays = x, w_gate_up, w_down, weights, chosen
            y = experts_mlp_accumulating(*arrays, Accumulators(*totals), backend="mosaic")
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(totals)

    f32, bf16, both = jnp.float32, jnp.bfloat16, [(experts, 2 * inter, hidden), (experts, hidden, inter)]
    totals = tuple(jax.ShapeDtypeStruct((2 * experts, *shape[1:]), f32) for shape in both)
    others = [((tokens, hidden), bf16), *((shape, bf16) for shape in both), ((tokens, k), f32), ((tokens, k), jnp.int32)]
    specs = P("data"), P("data"), P(), P(), P("data"), P("data")
    with jax.sharding.use_abstract_mesh(mesh):
        on_mesh = jax.shard_map(totals_after, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        traced = jax.jit(on_mesh, donate_argnums=0).trace(totals, *(jax.ShapeDtypeStruct(*other) for other in others))
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    for shape in both:
        array = "x".join(map(str, shape)) + "xf32"
        (call,) = (
            line for line in lowered.splitlines() if "custom_call @mosaic_gpu" in line and line.endswith(f"-> tensor<{array}>")
        )
        assert re.search(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 3\b", call), call[-300:]
    assert lowered.count("tf.aliasing_output") + lowered.count("jax.buffer_donor") == 2


@pytest.mark.parametrize("check_vma", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_replicated_weights_on_h200(check_vma):
    """The gradient of a replicated weight is summed over devices."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    shapes = [(256, 128), (4, 256, 128), (4, 128, 128), (256, 2)]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, [jnp.bfloat16] * 3 + [jnp.float32], strict=True)]

    def lower():
        layer = jax.shard_map(
            lambda *a: kernels.experts_mlp(*a, backend="mosaic"),
            mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma,
        )  # fmt: skip
        gradient = jax.jit(jax.grad(lambda *a: layer(*a).astype(jnp.float32).sum(), argnums=(1, 2)))
        chosen = jax.ShapeDtypeStruct((256, 2), jnp.int32)
        return gradient.trace(*arrays, chosen).lower(lowering_platforms=("cuda",)).as_text()

    with jax.sharding.use_abstract_mesh(mesh):
        assert lower().count("all_reduce") == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": jnp.float32}, "x is float32; it computes in bfloat16 and float16"),
        ({"hidden": 96}, "hidden is 96; it must be a multiple of 64"),
        ({"inter": 32}, "inter is 32; it must be a multiple of 64"),
        ({"inter": 64}, "hidden is 64 and inter is 64; one of them must be a multiple of 128"),
        (
            {"hidden": 14400},
            "hidden is 14400; gathering such rows takes 345632 bytes of shared memory, of which there are 232448",
        ),
    ],
)
def test_refusal(rng, change, message):
    """An input that the backend does not take is refused with the reason."""
    sizes = {"hidden": 64, "inter": 128} | change
    layer = make_layer(rng, "random", 5, 4, 2, **sizes)
    with pytest.raises(ValueError, match=f"argument backend: backend 'mosaic' does not take this input: {message}"):
        kernels.experts_mlp(*layer, backend="mosaic")


def test_plan_of_another_alignment(rng):
    x, w_gate_up, _, _, chosen = make_layer(rng, "random", 5, 4, 2, 64, 128)
    with pytest.raises(ValueError, match=r"row_alignment 1; it needs plan\(..., row_alignment=64\)"):
        kernels.gate_up(x, w_gate_up, plan(chosen, 4), backend="mosaic")


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 2, 16, 129])
def test_bits_of_a_token_of_qwen3_30b(rng, tokens):
    """They do not depend on 8192 other tokens, or on gradients that are computed too."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 8192, 128, 8, 2048, 768)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)

    @jax.jit
    def run(x, weights, chosen, dy):
        y, dx, _, _, d_weights = with_gradients(kernels.experts_mlp, (x, w_gate_up, w_down, weights, chosen), dy)
        return y, dx, d_weights

    of_all = run(x, weights, chosen, dy)
    own = [a[:tokens] for a in (x, weights, chosen, dy)]
    for alone, among_others in zip(run(*own), of_all, strict=True):
        np.testing.assert_array_equal(alone, among_others[:tokens])
    without_gradients = jax.jit(kernels.experts_mlp)(own[0], w_gate_up, w_down, *own[1:3])
    np.testing.assert_array_equal(without_gradients, of_all[0][:tokens])


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 129, 8192])
def test_layer_of_qwen3_30b(rng, tokens):
    """On the GPU it equals f64 for sampled tokens and experts."""
    experts, k = 128, 8
    layer = make_layer(rng, "random", tokens, experts, k, 2048, 768)
    dy = jnp.asarray(rng.normal(size=(tokens, 2048)), jnp.bfloat16)
    step = jax.jit(lambda *layer: with_gradients(kernels.experts_mlp, layer, dy))
    y, dx, d_gate_up, d_down, d_weights = first = step(*layer)
    for one, other in zip(first, step(*layer), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(jax.jit(kernels.experts_mlp)(*layer), y, err_msg="a forward pass alone writes no h")

    x, w_gate_up, w_down, weights, chosen = (np.asarray(a, np.float64) for a in layer)
    chosen, gradient = chosen.astype(int), np.asarray(dy, np.float64)
    for token in rng.choice(tokens, min(tokens, 20), replace=False):
        y_exact, dx_exact, d_weights_exact = np.zeros(2048), np.zeros(2048), np.zeros(k)
        for i, e in enumerate(chosen[token]):
            act, dh, g = backward_of_one(x[token], w_gate_up[e], w_down[e], weights[token, i], gradient[token])
            y_exact += weights[token, i] * w_down[e] @ act
            dx_exact += dh @ w_gate_up[e]
            d_weights_exact[i] = g @ act
        assert relative_error(y[token], y_exact) < 8e-3 and relative_error(dx[token], dx_exact) < 8e-3
        np.testing.assert_allclose(d_weights[token], d_weights_exact, atol=2e-2 * np.abs(d_weights_exact).max())
    e = chosen[0, 0]
    gate_up_exact, down_exact = np.zeros_like(w_gate_up[e]), np.zeros_like(w_down[e])
    for token, i in np.argwhere(chosen == e):
        act, dh, _ = backward_of_one(x[token], w_gate_up[e], w_down[e], weights[token, i], gradient[token])
        gate_up_exact += np.outer(dh, x[token])
        down_exact += np.outer(gradient[token], weights[token, i] * act)
    assert relative_error(d_gate_up[e], gate_up_exact) < 8e-3 and relative_error(d_down[e], down_exact) < 8e-3


def backward_of_one(x, w_gate_up, w_down, weight, dy):
    """act, dh and g = w_down^T dy of one token in one expert, in f64."""
    gate, up = np.split(w_gate_up @ x, 2)
    sigmoid = 1 / (1 + np.exp(-gate))
    g = w_down.T @ dy
    dact = weight * g
    return gate * sigmoid * up, np.concatenate([dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * gate * sigmoid]), g
