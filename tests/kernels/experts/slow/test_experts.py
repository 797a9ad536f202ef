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


@pytest.mark.parametrize("tokens, experts, k", [(13, 9, 4), pytest.param(1, 1, 1, marks=pytest.mark.thorough)])
@settings(max_examples=8, deadline=None)
@given(routing=st.sampled_from(["random", "one_takes_all", "half_empty", "some_nobody"]), seed=st.integers(0, 2**31))
def test_equals_the_oracle_in_f64_with_every_gradient(tokens, experts, k, routing, seed):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        *arrays, chosen = make_inputs(rng, tokens, experts, k, 6, 4, routing)
        others = arrays, chosen, jnp.asarray(rng.normal(size=arrays[0].shape))
        assert_near(compiled(kernels.experts_mlp, *others), compiled(oracle.experts_mlp, *others), 1e-12)


def test_bf16_stays_near_the_same_data_in_f64():
    with jax.enable_x64(True):
        inputs = make_inputs(seeds.rng(), 64, 8, 2, 32, 16, dtype=jnp.bfloat16)
        exact = [a.astype(jnp.float64) if a.dtype == jnp.bfloat16 else a for a in inputs]
        for actual, expected in zip(
            [forward(*inputs), *gradients(inputs)], [oracle.experts_mlp(*exact), *gradients(exact)], strict=True
        ):
            assert actual.dtype == jnp.bfloat16
            error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)
            assert error < 3e-2


forward = jax.jit(kernels.experts_mlp)


@jax.jit
def gradients(inputs):
    *arrays, chosen = inputs
    return jax.grad(lambda *a: kernels.experts_mlp(*a, chosen).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))(*arrays)


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
    assert jax.eval_shape(forward, *inputs).dtype == jnp.bfloat16
    assert [g.dtype for g in jax.eval_shape(gradients, inputs)] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]


def test_experts_without_tokens_get_exactly_zero():
    """And two runs give the same bits."""
    inputs = make_inputs(seeds.rng(), 12, 8, 2, 8, 4, "half_empty", jnp.float32)
    first, second = gradients(inputs), gradients(inputs)
    assert not first[1][4:].any() and not first[2][4:].any() and first[1][:4].any()
    jax.tree.map(np.testing.assert_array_equal, first, second)


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


def test_gate_up_and_down_compose_to_the_whole():
    """Each half has its own gradients."""

    def halves(x, w_gate_up, w_down, weights, chosen):
        rows = kernels.plan(chosen, w_gate_up.shape[0])
        return kernels.down(activated(kernels.gate_up(x, w_gate_up, rows)), w_down, weights, rows)

    with jax.enable_x64(True):
        compare(halves, oracle.experts_mlp, make_inputs(seeds.rng(), 33, 5, 2, 8, 4), 1e-12)


def test_weights_of_ids_out_of_range_may_be_nan_or_inf():
    *arrays, weights, chosen = make_inputs(seeds.rng(), 12, 8, 2, 8, 4, dtype=jnp.float32)
    chosen = chosen.at[2, 0].set(-1).at[4, 1].set(8)
    expected = [forward(*arrays, weights, chosen), *gradients((*arrays, weights, chosen))]
    assert not expected[4][(chosen < 0) | (chosen == 8)].any()
    for weight in (np.nan, np.inf):
        wild = jnp.where((chosen < 0) | (chosen == 8), weight, weights)
        found = [forward(*arrays, wild, chosen), *gradients((*arrays, wild, chosen))]
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_ids_of_8_bits_may_be_of_256_experts():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 256, 2, 8, 4, dtype=jnp.float32)
    layer = jax.jit(partial(kernels.experts_mlp, chunk_tokens=4, backend="xla"))
    run = partial(layer, x, w_gate_up, w_down, weights)
    np.testing.assert_array_equal(run(topk_experts=chosen.astype(jnp.uint8)), run(topk_experts=chosen))
