"""The experts in FP8: errors of every result against f32, and equality of the ways to give matrices, sums and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import Precision, experts_mlp
from moe_jax.kernels.experts.fp8.passes import quantise_experts
from moe_jax.kernels.experts.fp8.quantise import InFp8
from moe_jax.kernels.experts.weights import Accumulators
from tests.helpers import expert_layers, oracle, seeds
from tests.helpers.compiled_steps import quantise_matrices
from tests.helpers.expert_layers import Form, compute

TOKENS, EXPERTS, K, HIDDEN, INTER = 128, 4, 2, 256, 128
FP8 = Precision()


def _layer(routing="random", tokens=TOKENS, experts=EXPERTS):
    """Weights in f32; outlier channels of x, and gradients whose tokens are decades apart."""
    rng = seeds.rng()
    x, w_gate_up, w_down, weights, chosen = expert_layers.make_layer(rng, routing, tokens, experts, K, HIDDEN, INTER)
    x = x.at[:, :: HIDDEN // 4].multiply(8)
    dy = jnp.asarray(rng.normal(size=x.shape) * 10.0 ** rng.uniform(-3, 0, (tokens, 1)), x.dtype)
    return (x, w_gate_up.astype(jnp.float32), w_down.astype(jnp.float32), weights, chosen), dy


def _gradients(f):
    return jax.jit(lambda layer, dy: expert_layers.with_gradients(f, layer, dy))


_in_fp8 = _gradients(lambda *layer: experts_mlp(*layer, precision=FP8))
_exactly = _gradients(oracle.experts_mlp)
_keeping_fp8 = _gradients(lambda *layer: experts_mlp(*layer, precision=Precision(kept="fp8")))


def _assert_equal(results, expected):
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def _assert_near(results, layer, dy, bound):
    x, *others, chosen = layer
    exact = _exactly((x.astype(jnp.float32), *others, chosen), dy.astype(jnp.float32))
    for name, found, wanted in zip(expert_layers.ARRAYS, results, exact, strict=True):
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        own, alike = bound, 0.997
        if name == "weights":
            # A few tokens with large gradients would make up most of the error.
            found, wanted = (a / np.linalg.norm(np.asarray(dy, np.float64), axis=1, keepdims=True) for a in (found, wanted))
            own, alike = 0.1, 0.995
        norm = np.linalg.norm(wanted)
        assert np.linalg.norm(found - wanted) <= own * norm, name
        assert np.vdot(found, wanted) >= alike * norm * np.linalg.norm(found), name
        if name in ("y", "x"):
            assert (np.linalg.norm(found - wanted, axis=1) <= 0.12 * np.linalg.norm(wanted, axis=1)).all(), name


@pytest.mark.thorough
def test_errors_do_not_grow():
    """The bounds are the same for other numbers of tokens and experts."""
    layer, dy = _layer("random", 512, 32)
    _assert_near(_in_fp8(layer, dy), layer, dy, bound=0.07)


def test_errors_with_h_in_bf16_and_in_fp8():
    layer, dy = _layer()
    results, kept_in_fp8 = _in_fp8(layer, dy), _keeping_fp8(layer, dy)
    _assert_near(results, layer, dy, bound=0.07)
    _assert_near(kept_in_fp8, layer, dy, bound=0.07)
    _assert_equal(results[0], kept_in_fp8[0])
    assert np.any(np.asarray(results[1]) != np.asarray(kept_in_fp8[1])), "h was kept in bf16"


@pytest.mark.parametrize("routing", ["one_takes_all", "half_empty", "some_nobody"])
def test_hard_routings(routing):
    layer, dy = _layer(routing)
    results = _in_fp8(layer, dy)
    if routing == "some_nobody":
        nobody = np.all((np.asarray(layer[-1]) < 0) | (np.asarray(layer[-1]) >= EXPERTS), axis=1)
        assert nobody.any() and not np.any(np.asarray(results[0], np.float32)[nobody])
    if routing == "one_takes_all":
        assert not np.any(np.asarray(results[2])[:-1]), "experts without tokens have gradients of zero"
    _assert_near(results, layer, dy, bound=0.08)


def test_a_token_does_not_depend_on_others():
    """The bits of a token's y and dx stay the same next to other tokens, one with infinities."""
    (x, w_gate_up, w_down, weights, chosen), dy = _layer()
    y, dx, *_ = _in_fp8((x, w_gate_up, w_down, weights, chosen), dy)
    other = x.at[1:].multiply(3).at[7].set(jnp.inf), w_gate_up, w_down, weights, chosen
    y_beside, dx_beside, *_ = _in_fp8(other, dy.at[1:].multiply(5))
    _assert_equal((y[0], dx[0]), (y_beside[0], dx_beside[0]))
    assert np.isnan(np.asarray(y_beside, np.float32)[7]).all()


@pytest.mark.thorough
def test_given_copies_are_those_made_inside():
    (x, w_gate_up, w_down, weights, chosen), dy = _layer()
    inside = _in_fp8((x, w_gate_up, w_down, weights, chosen), dy)
    copies = jax.jit(quantise_experts)(w_gate_up, w_down)

    def with_copies(x, w_gate_up, w_down, weights, chosen):
        return compute(x, w_gate_up, w_down, weights, chosen, Form(copies=copies), precision=FP8)

    _assert_equal(_gradients(with_copies)((x, w_gate_up, w_down, weights, chosen), dy), inside)

    def frozen(x, weights, chosen):
        return experts_mlp(x, quantise_matrices(w_gate_up), quantise_matrices(w_down), weights, chosen, precision=FP8)

    _assert_equal(_gradients(frozen)((x, weights, chosen), dy), (inside[0], inside[1], inside[4]))


@pytest.mark.thorough
def test_sums_of_a_layer_of_a_stack():
    layer, dy = _layer()
    x, w_gate_up, w_down, weights, chosen = layer
    stack = [jnp.stack([jnp.zeros_like(w), w]) for w in (w_gate_up, w_down)]

    def value(sums):
        form = Form(jnp.int32(1), Accumulators(*sums, in_stack=True))
        y = compute(x, *stack, weights, chosen, form, precision=FP8)
        return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32))

    found = jax.jit(jax.grad(value))([jnp.full(w.shape, 2.0) for w in stack])
    _, _, *expected, _ = _in_fp8(layer, dy)
    for sums, gradient in zip(found, expected, strict=True):
        assert np.all(np.asarray(sums[0]) == 2)
        np.testing.assert_allclose(sums[1] - 2, gradient, atol=1e-5)


@pytest.mark.thorough
def test_a_stack_in_fp8():
    (x, w_gate_up, w_down, weights, chosen), _ = _layer()
    stack = [InFp8(quantise_matrices(jnp.stack([jnp.zeros_like(w), w]))) for w in (w_gate_up, w_down)]
    in_stack = jax.jit(lambda layer: compute(x, None, None, weights, chosen, Form(layer, copies=stack), precision=FP8))
    of_layer = jax.jit(lambda *layer: experts_mlp(*layer, precision=FP8))
    _assert_equal(in_stack(jnp.int32(1)), of_layer(x, w_gate_up, w_down, weights, chosen))


def test_no_tokens():
    (_, w_gate_up, w_down, _, _), _ = _layer()
    y = experts_mlp(
        jnp.zeros((0, HIDDEN), jnp.bfloat16),
        *(w_gate_up, w_down, jnp.zeros((0, K)), jnp.zeros((0, K), jnp.int32)),
        precision=FP8,
    )
    assert y.shape == (0, HIDDEN)


def test_refusals():
    (x, w_gate_up, w_down, weights, chosen), _ = _layer()
    quantised = quantise_matrices(w_gate_up), quantise_matrices(w_down)
    with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
        experts_mlp(x.astype(jnp.float32), w_gate_up, w_down, weights, chosen, precision=FP8)
    with pytest.raises(ValueError, match="inter is 64; it must be a multiple of 128"):
        experts_mlp(x, w_gate_up[:, :128], w_down[:, :, :64], weights, chosen, precision=FP8)
    with pytest.raises(ValueError, match=r"precision must be None or a Precision, as Precision\(\); got 'fp8'"):
        experts_mlp(x, w_gate_up, w_down, weights, chosen, precision="fp8")
    with pytest.raises(ValueError, match="need precision=Precision()"):
        experts_mlp(x, *quantised, weights, chosen)
    with pytest.raises(ValueError, match="got one of each"):
        experts_mlp(x, quantised[0], w_down, weights, chosen, precision=FP8)
    with pytest.raises(ValueError, match=r"^w_gate_up.scales must have shape \[4, 2, 2\].*got \[4, 2, 1\]"):
        wrong = quantised[0]._replace(scales=quantised[0].scales[..., :1])
        experts_mlp(x, wrong, quantised[1], weights, chosen, precision=FP8)
    with pytest.raises(ValueError, match="matrices in FP8 get no gradient"):
        jax.eval_shape(jax.grad(lambda w: experts_mlp(x, w, quantised[1], weights, chosen, precision=FP8).sum()), quantised[0])
    with pytest.raises(ValueError, match="kept='f16' must be one of 'bf16', 'fp8'"):
        Precision(kept="f16")
    with pytest.raises(ValueError, match="precision 'int8' must be one of 'bf16', 'fp8', 'fp8_kept'"):
        Precision.named("int8")
    assert Precision.named("bf16") is None and Precision.named("fp8") == FP8
