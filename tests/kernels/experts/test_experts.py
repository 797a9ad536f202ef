"""experts_mlp and its halves equal the oracle, with every gradient, for any routing."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import seeds
from expert_layers import gradients_by_accumulators, gradients_by_tickets, gradients_in_a_stack, make_layer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax import kernels
from moe_jax.kernels.experts.activation import gated_silu
from moe_jax.kernels.experts.backends import implementation
from moe_jax.kernels.experts.internal import Accumulators, TokenPart, experts_mlp_accumulating, experts_mlp_of_parts
from moe_jax.kernels.experts.routing import plan_of_few

ARGUMENTS = ("x", "w_gate_up", "w_down", "topk_weights")


def make_inputs(rng, tokens, experts, k, hidden, inter, routing="random", dtype=jnp.float64):
    x, w_gate_up, w_down = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
    )
    weights = jnp.asarray(rng.random((tokens, k)), dtype)
    if routing == "random":
        chosen = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], int).reshape(tokens, k)
    elif routing == "one_takes_all":
        chosen = np.full((tokens, k), experts - 1)
    else:  # the upper half of the experts is empty
        chosen = rng.integers(0, max(experts // 2, 1), (tokens, k))
    return x, w_gate_up, w_down, weights, jnp.asarray(chosen, jnp.int32)


def accumulating(x, w_gate_up, w_down, weights, chosen, totals, **options):
    """The experts with a pair of accumulators, or none."""
    accumulators = None if totals is None else Accumulators(*totals)
    return experts_mlp_accumulating(x, w_gate_up, w_down, weights, chosen, accumulators, **options)


def compare(ours, reference, inputs, tolerance):
    """Values, and gradients of a random projection of them."""
    *arrays, chosen = inputs
    direction = jnp.asarray(seeds.rng().normal(size=arrays[0].shape), arrays[0].dtype)
    assert_near(*(compiled(f, arrays, chosen, direction) for f in (ours, reference)), tolerance)


def with_gradients(f, arrays, chosen, direction):
    def loss(*arguments):
        y = f(*arguments, chosen)
        return (y * direction).sum(), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
    return y, *gradients


compiled = jax.jit(with_gradients, static_argnums=0)
"""Once for each shape, whatever the routing."""


def assert_near(actuals, others, tolerance):
    """In the relative Frobenius norm."""
    for name, actual, expected in zip(("y", *ARGUMENTS), actuals, others, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
        error = np.linalg.norm(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
        size = np.linalg.norm(np.asarray(expected, np.float64))
        assert error <= tolerance * size, f"{name}: relative error {error / max(size, 1e-300):.1e}"


@pytest.mark.parametrize("tokens, experts, k", [(1, 1, 1), (13, 9, 4), pytest.param(40, 3, 2, marks=pytest.mark.thorough)])
@settings(max_examples=8, deadline=None)
@given(routing=st.sampled_from(["random", "one_takes_all", "half_empty"]), seed=st.integers(0, 2**31))
def test_equals_the_oracle_in_f64_with_every_gradient(tokens, experts, k, routing, seed):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        *arrays, chosen = make_inputs(rng, tokens, experts, k, 6, 4, routing)
        others = arrays, chosen, jnp.asarray(rng.normal(size=arrays[0].shape))
        assert_near(compiled(kernels.experts_mlp, *others), compiled(oracle.experts_mlp, *others), 1e-12)


@pytest.mark.parametrize("tokens, experts, k", [(300, 64, 8), pytest.param(257, 16, 16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("routing", ["random", "one_takes_all"])
def test_equals_the_oracle_at_more_tokens(tokens, experts, k, routing):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), tokens, experts, k, 16, 8, routing)
        compare(kernels.experts_mlp, oracle.experts_mlp, inputs, 1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-2), pytest.param(jnp.float16, 4e-3, marks=pytest.mark.thorough)]
)
def test_low_precision_stays_near_the_same_data_in_f64(dtype, tolerance):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 64, 8, 2, 32, 16, dtype=dtype)
        exact = [a.astype(jnp.float64) if a.dtype == dtype else a for a in inputs]
        for actual, expected in zip(
            [kernels.experts_mlp(*inputs), *gradients(inputs)], [oracle.experts_mlp(*exact), *gradients(exact)], strict=True
        ):
            assert actual.dtype == dtype
            error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)
            assert error < tolerance


def gradients(inputs):
    *arrays, chosen = inputs
    return jax.grad(lambda *a: kernels.experts_mlp(*a, chosen).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))(*arrays)


@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in (1, 64))])
def test_chunks_of_tokens_give_the_same_sums(chunk):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 50, 6, 2, 8, 4)
        compare(lambda *a: kernels.experts_mlp(*a, chunk_tokens=chunk), kernels.experts_mlp, inputs, 1e-13)


def test_weights_of_another_dtype_get_gradients_of_that_dtype():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 9, 4, 2, 8, 4, dtype=jnp.float32)
    inputs = (x.astype(jnp.bfloat16), w_gate_up, w_down, weights, chosen)
    assert kernels.experts_mlp(*inputs).dtype == jnp.bfloat16
    assert [g.dtype for g in gradients(inputs)] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]


def test_experts_without_tokens_get_exactly_zero():
    inputs = make_inputs(seeds.rng(), 12, 8, 2, 8, 4, "half_empty", jnp.float32)
    _, d_gate_up, d_down, _ = gradients(inputs)
    assert not d_gate_up[4:].any() and not d_down[4:].any() and d_gate_up[:4].any()


def test_no_tokens_give_no_rows_and_zero_gradients():
    inputs = make_inputs(seeds.rng(), 0, 4, 2, 8, 4, dtype=jnp.float32)
    assert kernels.experts_mlp(*inputs).shape == (0, 8)
    assert not any(g.any() for g in gradients(inputs))


def test_two_runs_give_the_same_bits():
    inputs = make_inputs(seeds.rng(), 200, 8, 3, 16, 8, dtype=jnp.float32)
    for first, second in zip(gradients(inputs), gradients(inputs), strict=True):
        np.testing.assert_array_equal(first, second)


def test_gate_up_and_down_compose_to_the_whole():
    """Each half has its own gradients."""

    def halves(x, w_gate_up, w_down, weights, chosen):
        rows = kernels.plan(chosen, w_gate_up.shape[0])
        return kernels.down(gated_silu(kernels.gate_up(x, w_gate_up, rows)), w_down, weights, rows)

    with jax.enable_x64(True):
        compare(halves, oracle.experts_mlp, make_inputs(seeds.rng(), 33, 5, 2, 8, 4), 1e-12)


def test_products_with_the_hessian_are_those_of_the_oracle():
    def halves(x, w_gate_up, w_down, weights, chosen):
        rows = kernels.plan(chosen, w_gate_up.shape[0])
        h = kernels.gate_up(x, w_gate_up, rows, backend="xla")
        return kernels.down(gated_silu(h), w_down, weights, rows, backend="xla")

    def product(f, arrays, direction, chosen):
        return jax.jvp(jax.grad(lambda *a: jnp.sin(f(*a, chosen)).sum(), argnums=(0, 1, 2, 3)), arrays, direction)[1]

    with jax.enable_x64(True):
        (*arrays, chosen), (*direction, _) = (make_inputs(seeds.rng(), 33, 5, 2, 8, 4) for _ in range(2))
        expected = product(oracle.experts_mlp, tuple(arrays), tuple(direction), chosen)
        for f in (halves, partial(kernels.experts_mlp, backend="xla")):
            for actual, wanted in zip(product(f, tuple(arrays), tuple(direction), chosen), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-9 * float(jnp.abs(wanted).max()))


def test_forward_mode_and_second_gradients_are_refused():
    """The docstring of `experts_mlp` promises this."""
    *arrays, chosen = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)

    def total(x):
        return kernels.experts_mlp(x, *arrays[1:], chosen, backend="xla").sum()

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(total, arrays[:1], arrays[:1])
    with pytest.raises(ValueError):
        jax.grad(lambda x: jax.grad(total)(x).sum())(arrays[0])
    assert "jax.jvp" in kernels.experts_mlp.__doc__ and "gradient of its" in kernels.experts_mlp.__doc__


def test_runs_under_scan_remat_and_vmap():
    inputs = make_inputs(seeds.rng(), 10, 4, 2, 8, 4, dtype=jnp.float32)
    *_, weights, chosen = inputs

    def stacked(x, w_gate_up, w_down):
        def body(x, _):
            return x + kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen), None

        return jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0].sum()

    assert np.isfinite(jax.grad(stacked, argnums=1)(*inputs[:3])).all()
    batched = jax.vmap(lambda x: kernels.experts_mlp(x, *inputs[1:]))(jnp.stack([inputs[0], 2 * inputs[0]]))
    np.testing.assert_allclose(batched[0], kernels.experts_mlp(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [pytest.param(None, marks=pytest.mark.thorough), 7])
def test_accumulators_grow_by_the_weight_gradients(chunk_tokens):
    """Outputs and other gradients stay the same. The accumulators of experts without tokens keep their bits."""
    with jax.enable_x64(True):
        rng = seeds.rng()
        x, *weights, topk_weights, chosen = make_inputs(rng, 20, 6, 2, 8, 4, "half_empty")
        direction = jnp.asarray(rng.normal(size=x.shape))
        totals = tuple(jnp.asarray(rng.normal(size=w.shape)).at[:, 0, 0].set(-0.0) for w in weights)

        def loss(x, topk_weights, weights, totals):
            return (accumulating(x, *weights, topk_weights, chosen, totals, chunk_tokens=chunk_tokens) * direction).sum()

        arguments = x, topk_weights, tuple(weights)
        y, expected = jax.value_and_grad(loss, argnums=(0, 1, 2))(*arguments, None)
        y_with_totals, actual = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arguments, totals)
        for one, other in zip((y_with_totals, *actual[:2]), (y, *expected[:2]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert not any(gradient.any() for gradient in actual[2])
        for after, before, gradient in zip(actual[3], totals, expected[2], strict=True):
            np.testing.assert_allclose(after, before + gradient, rtol=0, atol=1e-13 * np.abs(gradient).max())
            np.testing.assert_array_equal(after[3:].view(jnp.int64), before[3:].view(jnp.int64))


@pytest.mark.parametrize(
    "routing",
    [
        "some_nobody",
        *(pytest.param(r, marks=pytest.mark.thorough) for r in ("random", "one_takes_all", "half_empty", "nobody")),
    ],
)
def test_weight_gradients_multiplied_later(routing):
    """They have the bits of gradients added to accumulators, and so have y and the other gradients. No ticket is read."""
    rng = seeds.rng()
    layer = make_layer(rng, routing, 20, 6, 2, 8, 4, jnp.float32)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.float32)
    found, expected = (
        jax.jit(f, static_argnums=0)("xla", layer, dy) for f in (gradients_by_tickets, gradients_by_accumulators)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_accumulators_take_no_memory_but_their_own(chunk_tokens):
    """The compiled loop over micro-batches works on the arrays that it is given, and copies none."""
    tokens, experts, k, hidden, inter = 64, 6, 2, 32, 64

    def after_all(totals, weights, batches):
        def after(totals, batch):
            def loss(totals):
                x, *routing = batch
                y = accumulating(x, *weights, *routing, totals, chunk_tokens=chunk_tokens)
                return y.astype(jnp.float32).sum()

            return jax.grad(loss)(totals), None

        return jax.lax.scan(after, totals, batches)[0]

    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    weights, totals = (tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes) for dtype in (jnp.bfloat16, jnp.float32))
    of_tokens = (hidden, jnp.bfloat16), (k, jnp.float32), (k, jnp.int32)
    batches = tuple(jax.ShapeDtypeStruct((3, tokens, width), dtype) for width, dtype in of_tokens)
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(after_all, donate_argnums=0).lower(totals, weights, batches).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(4 * math.prod(shape) for shape in shapes)
    for shape in shapes:
        array = re.escape(f"f32[{','.join(map(str, shape))}]")
        assert re.search(rf"= {array}\S* fusion\(", compiled.as_text()), "something of this shape is computed"
        assert not re.search(rf"= {array}\S* copy\(", compiled.as_text())


ON_GPU = [pytest.param(backend, marks=pytest.mark.gpu) for backend in ("mosaic", "triton")]


@pytest.mark.parametrize("backend", ["xla", *ON_GPU])
def test_layer_of_a_stack(backend):
    """Kernels read a layer's weights inside a stack and add to its sums there: the same bits, and other layers' sums stay."""
    if not implementation(backend).is_native():
        pytest.skip(f"backend {backend} is not written for this device")
    rng = seeds.rng()
    layer = make_layer(rng, "half_empty", 300, 8, 2, 128, 64, jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    expected = jax.jit(gradients_by_accumulators, static_argnums=0)(backend, layer, dy)
    found, of_others = jax.jit(gradients_in_a_stack, static_argnums=0)(backend, layer, dy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for before, after in of_others:
        assert (before == -1).all() and (after == 1).all()


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.thorough), *ON_GPU])
def test_stacked_accumulators_grow_in_place(backend):
    """Our kernels agree bit for bit, though XLA takes each layer's accumulators out of the stack and puts them back."""
    if not implementation(backend).is_native():
        pytest.skip(f"backend {backend} is not written for this device")
    rng = seeds.rng()
    layers, (tokens, experts, k, hidden, inter) = 3, (300, 8, 2, 128, 64)
    x, *weights, topk_weights, chosen = make_inputs(rng, tokens, experts, k, hidden, inter, "half_empty", jnp.float32)
    x, how = x.astype(jnp.bfloat16), {"backend": backend}
    totals = tuple(jnp.asarray(rng.normal(size=(layers, *w.shape)), jnp.float32) for w in weights)

    def loss(scale, weights, totals):
        y = accumulating(x * scale, *weights, topk_weights, chosen, totals, **how)
        return jnp.sin(y.astype(jnp.float32)).sum()

    def of_layer(i, totals):
        scale = (1 + i).astype(x.dtype)
        after = jax.grad(loss, 2)(scale, weights, tuple(jax.lax.dynamic_index_in_dim(t, i, 0, keepdims=False) for t in totals))
        return tuple(jax.lax.dynamic_update_index_in_dim(t, new, i, 0) for t, new in zip(totals, after, strict=True))

    expected = [
        [t[i] + d for t, d in zip(totals, jax.jit(jax.grad(loss, 1))(jnp.asarray(1 + i, x.dtype), weights, None), strict=True)]
        for i in range(layers)
    ]
    actual = jax.jit(lambda totals: jax.lax.fori_loop(0, layers, of_layer, totals), donate_argnums=0)(totals)
    for matrix in range(2):
        # XLA may choose other matmuls in another program.
        tolerance = 1e-5 if backend == "xla" else 0
        np.testing.assert_allclose(actual[matrix], jnp.stack([after[matrix] for after in expected]), tolerance, tolerance)


def test_accumulators_of_devices_are_their_own():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, *weights, topk_weights, chosen = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    totals = tuple(jnp.ones_like(w) for w in weights)

    def after(totals, x, topk_weights, chosen):
        return jax.grad(lambda t: accumulating(x, *weights, topk_weights, chosen, t).sum())(totals)

    def on_mesh(of_totals):
        specs = of_totals, P("data"), P("data"), P("data")
        return jax.shard_map(after, mesh=mesh, in_specs=specs, out_specs=of_totals)(totals, x, topk_weights, chosen)

    for one, other in zip(on_mesh(P("data")), after(totals, x, topk_weights, chosen), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"accumulators\.gate_up must vary over the mesh axes \['data'\]"):
        on_mesh(P())


def test_keeps_h_but_nothing_of_tokens_times_k_times_hidden():
    inputs = make_inputs(seeds.rng(), 32, 4, 2, 64, 4, dtype=jnp.float32)
    *arrays, chosen = inputs
    _, vjp = jax.vjp(lambda *a: kernels.experts_mlp(*a, chosen), *arrays)
    shapes = [leaf.shape for leaf in jax.tree.leaves(vjp)]
    assert (64, 8) in shapes  # h: 32 tokens * 2 choices, 2 * inter
    assert not any(np.prod(shape) >= 64 * 64 and shape[0] == 64 for shape in shapes if shape)


def test_memory_does_not_grow_with_experts_times_rows():
    """128 experts, 8192 rows: the compiled temporaries stay within a few copies of the rows."""
    tokens, experts, k, hidden, inter = 1024, 128, 8, 64, 32
    shapes = [(tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter), (tokens, k)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    chosen = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    # On a GPU the workspace of its matmul library would be counted too.
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(lambda *a: kernels.experts_mlp(*a)).lower(*arrays, chosen).compile()
    rows_bytes = tokens * k * hidden * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * rows_bytes


def test_ids_out_of_range_add_nothing():
    with jax.enable_x64(True):
        *arrays, chosen = make_inputs(seeds.rng(), 20, 5, 3, 8, 4)
        chosen = chosen.at[3:9, 1].set(5).at[7:, 2].set(-1)
        compare(kernels.experts_mlp, oracle.experts_mlp, (*arrays, chosen), 1e-12)
        # The compiler knows the routing.
        compare(lambda *a: kernels.experts_mlp(*a[:-1], chosen), oracle.experts_mlp, (*arrays, chosen), 1e-12)
        d_weights = gradients((*arrays, chosen))[3]
        assert not d_weights[(chosen < 0) | (chosen > 4)].any()


@pytest.mark.parametrize("weight", [np.nan, pytest.param(np.inf, marks=pytest.mark.thorough)])
def test_weights_of_ids_out_of_range_may_be_nan_or_inf(weight):
    *arrays, weights, chosen = make_inputs(seeds.rng(), 6, 4, 2, 8, 4, dtype=jnp.float32)
    chosen = chosen.at[2, 0].set(-1).at[4, 1].set(4)
    wild = jnp.where((chosen < 0) | (chosen == 4), weight, weights)
    for actual, expected in zip(
        [kernels.experts_mlp(*arrays, wild, chosen), *gradients((*arrays, wild, chosen))],
        [kernels.experts_mlp(*arrays, weights, chosen), *gradients((*arrays, weights, chosen))],
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("max_pairs", [20, *(pytest.param(room, marks=pytest.mark.thorough) for room in (37, 60))])
def test_room_for_fewer_pairs_leaves_out_the_last_experts(max_pairs):
    """At most 37 of 60 pairs are in range: with room for 37 the result is the same as without the bound."""
    with jax.enable_x64(True):
        *arrays, chosen = make_inputs(seeds.rng(), 20, 5, 3, 8, 4)
        chosen = jnp.where(jnp.arange(60).reshape(20, 3) % 60 < 37, chosen, -1)
        order = jnp.argsort(jnp.where(chosen < 0, 5, chosen).reshape(-1), stable=True)
        within = (*arrays, chosen.reshape(-1).at[order[max_pairs:]].set(-1).reshape(20, 3))

        def in_room(x, w_gate_up, w_down, weights, _):
            return experts_mlp_of_parts([TokenPart(x, weights, chosen)], w_gate_up, w_down, max_pairs=[max_pairs])[0]

        compare(in_room, oracle.experts_mlp, within, 1e-12)


def test_chunks_add_bf16_weight_gradients_in_f32():
    """512 chunks: a bf16 running sum would lose most of the later ones."""
    inputs = make_inputs(seeds.rng(), 512, 2, 1, 8, 4, dtype=jnp.bfloat16)
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in inputs]
    chunked = jax.grad(lambda w: kernels.experts_mlp(*inputs[:2], w, *inputs[3:], chunk_tokens=1).astype(jnp.float32).sum())
    exact = gradients(wide)[2]
    error = np.linalg.norm(np.asarray(chunked(inputs[2]), np.float32) - exact) / np.linalg.norm(exact)
    assert error < 8e-3


@pytest.mark.parametrize(
    "ends, routing",
    [
        ([3, 15], "random"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (([], "random"), ([7, 14], "half_empty"), ([3, 15], "one_takes_all"))
        ),
    ],
)
def test_parts_give_what_all_their_tokens_give_at_once(ends, routing):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 21, 5, 2, 8, 4, routing)

        def in_parts(x, w_gate_up, w_down, weights, chosen):
            parts = list(map(TokenPart, *(jnp.split(a, ends) for a in (x, weights, chosen))))
            room = [2 * part.x.shape[0] for part in parts]
            shares = [next(n for n in (2, 3, 7) if part.x.shape[0] % n == 0) for part in parts]
            return jnp.concatenate(experts_mlp_of_parts(parts, w_gate_up, w_down, max_pairs=room, shares=shares))

        compare(in_parts, oracle.experts_mlp, inputs, 1e-12)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_tokens_without_choices_get_nothing(tokens, backend):
    *arrays, _, _ = make_inputs(seeds.rng(), tokens, 4, 2, 128, 64, dtype=jnp.bfloat16)
    y = kernels.experts_mlp(*arrays, jnp.zeros((tokens, 0)), jnp.zeros((tokens, 0), jnp.int32), backend=backend)
    np.testing.assert_array_equal(y, np.zeros((tokens, 128)))


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_ids_of_8_bits_may_be_of_256_experts(chunk_tokens):
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 256, 2, 8, 4, dtype=jnp.float32)
    run = partial(kernels.experts_mlp, x, w_gate_up, w_down, weights, chunk_tokens=chunk_tokens, backend="xla")
    np.testing.assert_array_equal(run(topk_experts=chosen.astype(jnp.uint8)), run(topk_experts=chosen))


def test_differentiable_halves_refuse_plan_of_few():
    """`gate_up` and `down` have gradients."""
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 1, 3, 2, 8, 4, dtype=jnp.float32)
    rows = plan_of_few(chosen, 3, 1)
    with pytest.raises(ValueError, match=r"plan must come from plan.* plan_of_few"):
        kernels.gate_up(x, w_gate_up, rows, backend="xla")
    with pytest.raises(ValueError, match=r"plan must come from plan.* plan_of_few"):
        kernels.down(jnp.zeros((rows.num_rows, 4)), w_down, weights, rows, backend="xla")


def test_barriers_keep_the_parts_in_order():
    """A part waits for the parts before it; its result waits for no other part. Without barriers XLA joins small operations of
    all parts, and none begins before the last part's tokens are there. The first part's down pass waits for all others."""
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 3, 2, 8, 4, dtype=jnp.float32)
    parts = list(map(TokenPart, *(jnp.split(a, 3) for a in (x, weights, chosen))))
    text = jax.jit(experts_mlp_of_parts).lower(parts, w_gate_up, w_down).as_text()
    assert text.count("optimization_barrier") == 3


def test_parts_that_differ_in_more_than_their_tokens_are_refused():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 3, 2, 8, 4, dtype=jnp.float32)
    part = TokenPart(x, weights, chosen)
    one_choice = part._replace(topk_weights=weights[:, :1], topk_experts=chosen[:, :1])
    with pytest.raises(ValueError, match=r"the same dtypes and widths; got .*, int32\[tokens, 2\]; .*, int32\[tokens, 1\]"):
        experts_mlp_of_parts([part, one_choice], w_gate_up, w_down)
    with pytest.raises(ValueError, match=r"got float32\[tokens, 8\], .*; bfloat16\[tokens, 8\], "):
        experts_mlp_of_parts([part, part._replace(x=x.astype(jnp.bfloat16))], w_gate_up, w_down)
    with pytest.raises(ValueError, match="one or more, all of the same dtypes and widths; got none"):
        experts_mlp_of_parts([], w_gate_up, w_down)
    with pytest.raises(ValueError, match="max_pairs must have one entry for each of the 2 parts; got 1"):
        experts_mlp_of_parts([part, part], w_gate_up, w_down, max_pairs=[3])
    with pytest.raises(ValueError, match="max_pairs must be at least 1 or None; got 0"):
        experts_mlp_of_parts([part], w_gate_up, w_down, max_pairs=[0])
    with pytest.raises(
        ValueError, match=r"shares must have one entry for each part, a divisor of its tokens; got \[4\] for \[6\] tokens"
    ):
        experts_mlp_of_parts([part], w_gate_up, w_down, shares=[4])


@pytest.mark.parametrize("chunk_tokens", [None, pytest.param(7, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sharding", ["shard_map", pytest.param("shard_map unchecked", marks=pytest.mark.thorough), "gspmd"])
def test_runs_on_a_mesh(sharding, chunk_tokens):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    inputs = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    layer = partial(kernels.experts_mlp, chunk_tokens=chunk_tokens)
    if sharding == "gspmd":
        on_mesh = jax.jit(layer, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    else:
        check = sharding == "shard_map"
        on_mesh = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check)
    compare(on_mesh, oracle.experts_mlp, inputs, 1e-5)


def test_a_shard_map_may_leave_axes_of_its_mesh_to_the_compiler():
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    inputs = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    specs = (P("expert"), P(), P(), P("expert"), P("expert"))

    def of_all(*arguments):
        on_mesh = jax.shard_map(
            kernels.experts_mlp, mesh=mesh, in_specs=specs, out_specs=P("expert"), axis_names={"expert"}, check_vma=True
        )
        return jnp.sum(on_mesh(*arguments))

    gradients = jax.eval_shape(jax.jit(jax.grad(of_all, argnums=(0, 1, 2, 3))), *inputs)
    assert [a.shape for a in gradients] == [a.shape for a in inputs[:4]]


@pytest.mark.parametrize(
    "position, shape, message",
    [
        (0, (5, 8, 1), r"x must have shape \[tokens, hidden\]; got \[5, 8, 1\]"),
        (1, (4, 8, 9), r"w_gate_up must .* \[experts, 2\*inter, hidden\] with experts=4, .*, hidden=8; got \[4, 8, 9\]"),
        (2, (4, 7, 4), r"w_down must .* \[experts, hidden, inter\] with hidden=8; got \[4, 7, 4\]"),
        (3, (5, 3), r"topk_weights must .* \[tokens, k\] with tokens=5, k=2; got \[5, 3\]"),
        (4, (6, 2), r"topk_experts must .* \[tokens, k\] with tokens=5; got \[6, 2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(position, shape, message):
    inputs = list(make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32))
    inputs[position] = jnp.zeros(shape, inputs[position].dtype)
    with pytest.raises(ValueError, match=message):
        kernels.experts_mlp(*inputs)


def test_shapes_that_do_not_fit_the_plan_are_named():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    rows = kernels.plan(chosen, 4)
    with pytest.raises(ValueError, match=r"x must .* with tokens=5; got \[4, 8\]"):
        kernels.gate_up(x[:4], w_gate_up, rows)
    with pytest.raises(ValueError, match=r"w_gate_up must .* with experts=4, hidden=8; got \[3, 8, 8\]"):
        kernels.gate_up(x, w_gate_up[:3], rows)
    with pytest.raises(ValueError, match=r"act must .* with rows=10; got \[5, 8\]"):
        kernels.down(x, w_down, weights, rows)


def test_mesh_axes_along_which_jax_asks_for_layouts_are_refused():
    x, *others = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x, chosen = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, others[-1]))
    with pytest.raises(ValueError, match=r"x is split as P\('data', None\) over mesh axes of type Explicit.*make_mesh"):
        kernels.experts_mlp(x, *others)
    with pytest.raises(ValueError, match="topk_experts is split"):
        kernels.plan(chosen, 4)
    in_parts = jax.shard_map(kernels.experts_mlp, mesh=mesh, in_specs=(P("data"), *[P()] * 4), out_specs=P("data"))
    np.testing.assert_allclose(in_parts(x, *others), kernels.experts_mlp(np.asarray(x), *others), rtol=1e-5, atol=1e-5)


def test_other_bad_arguments_are_named():
    inputs = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="hidden and inter must be at least 1; got 8 and 0"):
        kernels.experts_mlp(inputs[0], inputs[1][:, :0], inputs[2][:, :, :0], *inputs[3:])
    with pytest.raises(ValueError, match="x must have a floating dtype; got int32"):
        kernels.experts_mlp(inputs[0].astype(jnp.int32), *inputs[1:])
    with pytest.raises(ValueError, match="topk_experts must have an integer dtype; got float32"):
        kernels.experts_mlp(*inputs[:4], inputs[4].astype(jnp.float32))
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1 or None; got 0"):
        kernels.experts_mlp(*inputs, chunk_tokens=0)
    totals = jnp.zeros_like(inputs[1]), jnp.zeros_like(inputs[2])
    with pytest.raises(ValueError, match=r"accumulators\.gate_up must have dtype float32, in which .* summed; got bfloat16"):
        accumulating(*inputs, (totals[0].astype(jnp.bfloat16), totals[1]))
    with pytest.raises(ValueError, match=r"accumulators\.down must .* with experts=4, hidden=8, inter=4; got \[3, 8, 4\]"):
        accumulating(*inputs, (totals[0], totals[1][:3]))
    with pytest.raises(ValueError, match=r"accumulators must be two arrays, of .* shape; got \[4, 8, 8\], None"):
        accumulating(*inputs, (totals[0], None))
    with pytest.raises(ValueError, match=r"accumulators must be two arrays, of .* shape; got None, \[4, 8, 4\]"):
        accumulating(*inputs, (None, totals[1]))
    with pytest.raises(TypeError, match="argument"):
        accumulating(*inputs, (*totals, False, None, totals[0]))
    with pytest.raises(ValueError, match="argument backend: unknown backend 'cuda'; choose one of 'mosaic', 'triton', 'xla'"):
        kernels.experts_mlp(*inputs, backend="cuda")
