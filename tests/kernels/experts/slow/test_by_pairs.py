"""The experts of a few (token, expert) pairs, for decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic import by_pairs
from tests.helpers.expert_layers import make_layer, relative_error, types_of
from tests.helpers.lowered import launches_on_h200, lowered_for_h200, num_kernels
from tests.helpers.oracle import experts_mlp as exact_experts_mlp


def layer_of(x, w_gate_up, w_down, weights, chosen):
    return kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen, backend="mosaic")


@pytest.mark.parametrize(
    "routing, tokens, experts, k, hidden, inter, dtype",
    [
        ("some_nobody", 3, 32, 4, 128, 128, "bfloat16"),
        pytest.param("one_takes_all", 2, 8, 2, 128, 256, "float16", marks=pytest.mark.thorough),
    ],
)
def test_values(rng, routing, tokens, experts, k, hidden, inter, dtype):
    """Errors against f64 are as small as the xla backend's. Ids of a narrow dtype give the same result."""
    layer = make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype)
    assert by_pairs.takes(layer[4], *layer[2].shape)
    with jax.enable_x64(True):
        exact = exact_experts_mlp(*(a.astype(jnp.float64) for a in layer[:4]), layer[4])
    y, other = layer_of(*layer), kernels.experts_mlp(*layer, backend="xla")
    assert (y.shape, y.dtype) == (other.shape, other.dtype)
    assert relative_error(y, exact) <= 1.5 * relative_error(other, exact) + 1e-6
    np.testing.assert_array_equal(layer_of(*layer[:4], layer[4].astype(jnp.int8)), y)


def is_by_pairs(*sizes):
    names = [launch.params["name"] for launch in launches_on_h200(layer_of, *types_of(*sizes))]
    assert len(names) == 2
    return names == ["gated_matmul_of_pairs", "matmul_of_pairs"]


@pytest.mark.parametrize(
    "tokens, experts, k, hidden, inter",
    [
        (1, 128, 8, 2048, 768),
        pytest.param(4, 256, 8, 7168, 2048, marks=pytest.mark.thorough),
        pytest.param(1, 1, 1, 128, 32768, marks=pytest.mark.thorough),
    ],
)
def test_by_pairs(tokens, experts, k, hidden, inter):
    """Few pairs are computed by pairs."""
    assert num_kernels(lowered_for_h200(layer_of, *types_of(tokens, experts, k, hidden, inter))) == 2
    assert is_by_pairs(tokens, experts, k, hidden, inter)


@pytest.mark.parametrize(
    "tokens, experts, k, hidden, inter, why",
    [
        (5, 256, 8, 256, 128, "40 pairs"),
        (3, 8, 2, 256, 128, "three tokens would share experts"),
        (1, 8, 2, 256, 192, "inter is no multiple of 128"),
        (1, 8, 2, 64, 128, "nor is hidden"),
        (1, 2, 1, 128, 65536, "two rows take all of a block's shared memory"),
    ],
)
def test_by_rows(tokens, experts, k, hidden, inter, why):
    """Other inputs are computed by rows, whose kernels `test_mosaic_lowered` lowers."""
    assert not is_by_pairs(tokens, experts, k, hidden, inter), why


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_bits_of_many_tokens(rng, tokens):
    """The bits equal the bits of many tokens in every run."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 70, 128, 8, 2048, 768)
    many = layer_of(x, w_gate_up, w_down, weights, chosen)[:tokens]
    few = jax.jit(layer_of)
    for _ in range(100):
        np.testing.assert_array_equal(few(x[:tokens], w_gate_up, w_down, weights[:tokens], chosen[:tokens]), many)
