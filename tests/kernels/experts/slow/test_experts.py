"""experts_mlp and its halves equal the oracle, with every gradient, for any routing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax import kernels
from moe_jax.kernels.experts.activation import activated
from tests.helpers import oracle, seeds
from tests.helpers.expert_gradients import assert_near, compare, compiled, make_inputs


@pytest.mark.parametrize("tokens, experts, k", [(1, 1, 1), (13, 9, 4), pytest.param(40, 3, 2, marks=pytest.mark.thorough)])
@settings(max_examples=8, deadline=None)
@given(routing=st.sampled_from(["random", "one_takes_all", "half_empty"]), seed=st.integers(0, 2**31))
def test_equals_the_oracle_in_f64_with_every_gradient(tokens, experts, k, routing, seed):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        *arrays, chosen = make_inputs(rng, tokens, experts, k, 6, 4, routing)
        others = arrays, chosen, jnp.asarray(rng.normal(size=arrays[0].shape))
        assert_near(compiled(kernels.experts_mlp, *others), compiled(oracle.experts_mlp, *others), 1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("tokens, experts, k", [(300, 64, 8), (257, 16, 16)])
@pytest.mark.parametrize("routing", ["random", "one_takes_all"])
def test_equals_the_oracle_at_more_tokens(tokens, experts, k, routing):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), tokens, experts, k, 16, 8, routing)
        compare(kernels.experts_mlp, oracle.experts_mlp, inputs, 1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (jnp.bfloat16, 3e-2),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((jnp.float32, 1e-6), (jnp.float16, 4e-3))),
    ],
)
def test_low_precision_stays_near_the_same_data_in_f64(dtype, tolerance):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 64, 8, 2, 32, 16, dtype=dtype)
        exact = [a.astype(jnp.float64) if a.dtype == dtype else a for a in inputs]
        for actual, expected in zip(
            [forward(*inputs), *gradients(inputs)], [oracle.experts_mlp(*exact), *gradients(exact)], strict=True
        ):
            assert actual.dtype == dtype
            error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)
            assert error < tolerance


forward = jax.jit(kernels.experts_mlp)


@jax.jit
def gradients(inputs):
    *arrays, chosen = inputs
    return jax.grad(lambda *a: kernels.experts_mlp(*a, chosen).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))(*arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in (1, 64))])
def test_chunks_of_tokens_give_the_same_sums(chunk):
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 50, 6, 2, 8, 4)
        compare(lambda *a: kernels.experts_mlp(*a, chunk_tokens=chunk), kernels.experts_mlp, inputs, 1e-13)


def test_chunks_add_bf16_weight_gradients_in_f32():
    """512 chunks: a bf16 running sum would lose most of the later ones."""
    inputs = make_inputs(seeds.rng(), 512, 2, 1, 8, 4, dtype=jnp.bfloat16)
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in inputs]

    @jax.jit
    def chunked(x, w_gate_up, w_down, *routing):
        return jax.grad(lambda w: kernels.experts_mlp(x, w_gate_up, w, *routing, chunk_tokens=1).astype(jnp.float32).sum())(
            w_down
        )

    exact = gradients(wide)[2]
    error = np.linalg.norm(np.asarray(chunked(*inputs), np.float32) - exact) / np.linalg.norm(exact)
    assert error < 8e-3


def test_weights_of_another_dtype_get_gradients_of_that_dtype():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 9, 4, 2, 8, 4, dtype=jnp.float32)
    inputs = (x.astype(jnp.bfloat16), w_gate_up, w_down, weights, chosen)
    assert forward(*inputs).dtype == jnp.bfloat16
    assert [g.dtype for g in gradients(inputs)] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]


def test_experts_without_tokens_get_exactly_zero():
    inputs = make_inputs(seeds.rng(), 12, 8, 2, 8, 4, "half_empty", jnp.float32)
    _, d_gate_up, d_down, _ = gradients(inputs)
    assert not d_gate_up[4:].any() and not d_down[4:].any() and d_gate_up[:4].any()


def test_no_tokens_give_no_rows_and_zero_gradients():
    inputs = make_inputs(seeds.rng(), 0, 4, 2, 8, 4, dtype=jnp.float32)
    assert kernels.experts_mlp(*inputs).shape == (0, 8)
    assert not any(g.any() for g in gradients(inputs))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_tokens_without_choices_get_nothing(tokens, backend):
    *arrays, _, _ = make_inputs(seeds.rng(), tokens, 4, 2, 128, 64, dtype=jnp.bfloat16)
    y = kernels.experts_mlp(*arrays, jnp.zeros((tokens, 0)), jnp.zeros((tokens, 0), jnp.int32), backend=backend)
    np.testing.assert_array_equal(y, np.zeros((tokens, 128)))


def test_two_runs_give_the_same_bits():
    inputs = make_inputs(seeds.rng(), 200, 8, 3, 16, 8, dtype=jnp.float32)
    for first, second in zip(gradients(inputs), gradients(inputs), strict=True):
        np.testing.assert_array_equal(first, second)


def test_gate_up_and_down_compose_to_the_whole():
    """Each half has its own gradients."""

    def halves(x, w_gate_up, w_down, weights, chosen):
        rows = kernels.plan(chosen, w_gate_up.shape[0])
        return kernels.down(activated(kernels.gate_up(x, w_gate_up, rows)), w_down, weights, rows)

    with jax.enable_x64(True):
        compare(halves, oracle.experts_mlp, make_inputs(seeds.rng(), 33, 5, 2, 8, 4), 1e-12)


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
        [forward(*arrays, wild, chosen), *gradients((*arrays, wild, chosen))],
        [forward(*arrays, weights, chosen), *gradients((*arrays, weights, chosen))],
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_ids_of_8_bits_may_be_of_256_experts(chunk_tokens):
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 256, 2, 8, 4, dtype=jnp.float32)
    layer = jax.jit(partial(kernels.experts_mlp, chunk_tokens=chunk_tokens, backend="xla"))
    run = partial(layer, x, w_gate_up, w_down, weights)
    np.testing.assert_array_equal(run(topk_experts=chosen.astype(jnp.uint8)), run(topk_experts=chosen))
