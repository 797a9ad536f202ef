"""The chunked loss equals log_softmax over all logits, with its gradients, and never holds those logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import cross_entropy


def plain(hidden, weight, labels, mask):
    log_probabilities = jax.nn.log_softmax(hidden @ weight.T)
    picked = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]
    return -jnp.where(mask, picked, 0).sum()


def make_inputs(dtype=jnp.float64, vocab=53):
    rng = np.random.default_rng()
    hidden, weight = jnp.asarray(rng.normal(size=(17, 8)), dtype), jnp.asarray(3 * rng.normal(size=(vocab, 8)), dtype)
    return hidden, weight, jnp.asarray(rng.integers(0, vocab, 17)), jnp.asarray(rng.random(17) < 0.6)


@pytest.mark.parametrize("chunk", [1, 10, 26, 53, 1000])
def test_equals_the_plain_loss_with_gradients(chunk):
    with jax.enable_x64(True):
        hidden, weight, labels, mask = make_inputs()

        def chunked(hidden, weight):
            return 2.5 * cross_entropy(hidden, weight, labels, mask, chunk_vocab=chunk)[0]

        value, gradients = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, weight)
        np.testing.assert_allclose(value, 2.5 * plain(hidden, weight, labels, mask), rtol=1e-12)
        expected = jax.grad(lambda h, w: 2.5 * plain(h, w, labels, mask), argnums=(0, 1))(hidden, weight)
        for actual, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-12)
        assert float(cross_entropy(hidden, weight, labels, mask)[1]) == int(mask.sum())


def test_a_replicated_heads_gradient_sums_over_the_devices_of_a_shard_map():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def of_shard(hidden, weight, labels, mask):
        return jax.lax.psum(cross_entropy(hidden, weight, labels, mask, chunk_vocab=10)[0], "data")

    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(P("data"), P(), P("data"), P("data")), out_specs=P())
    gradient = jax.jit(jax.grad(sharded, argnums=(0, 1)))
    expected = jax.grad(plain, argnums=(0, 1))(hidden, weight, labels, mask)
    for actual, wanted in zip(gradient(hidden, weight, labels, mask), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    text = str(gradient.trace(hidden, weight, labels, mask).jaxpr)
    assert len(re.findall(r"\bpsum\w*\[", text)) == 2, "the loss and the head's gradient"


def test_labels_of_masked_tokens_do_not_matter():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    wild = jnp.where(mask, labels, -100)
    assert cross_entropy(hidden, weight, wild, mask)[0] == cross_entropy(hidden, weight, labels, mask)[0]


def test_bf16_operands_accumulate_in_f32_and_gradients_keep_their_dtypes():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    d_hidden, d_weight = jax.grad(lambda h, w: cross_entropy(h, w, labels, mask)[0], argnums=(0, 1))(
        hidden.astype(jnp.bfloat16), weight
    )
    assert d_hidden.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32


def test_the_whole_logits_never_exist():
    hidden, weight, labels, mask = make_inputs(jnp.float32, vocab=64)

    def loss(hidden, weight):
        return cross_entropy(hidden, weight, labels, mask, chunk_vocab=16)[0]

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, weight))
    assert "f32[17,16]" in text and "f32[17,64]" not in text


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    with pytest.raises(ValueError, match=r"head_weight \[vocab, D\]; got \(17, 8\) and \(53, 7\)"):
        cross_entropy(hidden, weight[:, :7], labels, mask)
    with pytest.raises(ValueError, match=r"labels and mask must have shape \(17,\)"):
        cross_entropy(hidden, weight, labels[:3], mask)
