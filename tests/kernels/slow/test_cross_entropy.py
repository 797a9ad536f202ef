"""The chunked loss equals log_softmax over all logits, with its gradients, and never holds those logits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.checkpoint.messages import LARGEST_WEIGHT, SMALLEST_WEIGHT
from moe_jax.kernels import cross_entropy
from tests.helpers import seeds


def plain(hidden, weight, labels, mask):
    log_probabilities = jax.nn.log_softmax(hidden @ weight.T)
    picked = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]
    return -jnp.where(mask != 0, mask * picked, 0).sum()


def make_inputs(dtype=jnp.float64, vocab=53):
    rng = seeds.rng()
    hidden, weight = jnp.asarray(rng.normal(size=(17, 8)), dtype), jnp.asarray(3 * rng.normal(size=(vocab, 8)), dtype)
    return hidden, weight, jnp.asarray(rng.integers(0, vocab, 17)), jnp.asarray(rng.random(17) < 0.6)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, hidden, weight, *others):
    """Returns the loss, the divisor, and the gradients of hidden and weight."""
    (loss, divisor), gradients = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, weight, *others)
    return loss, divisor, *gradients


def plain_sums(hidden, weight, labels, mask):
    return plain(hidden, weight, labels, mask), mask.astype(hidden.dtype).sum()


in_chunks = partial(cross_entropy, chunk_tokens=5)


def make_weights(mask):
    """Returns random weights of the tokens in the mask, and 0 for others."""
    return jnp.asarray(mask * seeds.rng().uniform(0.1, 3, mask.shape), jnp.float32)


in_one_chunk = partial(cross_entropy, chunk_tokens=17)


@pytest.mark.parametrize("f, weighted", [(in_chunks, False), (in_chunks, True), (in_one_chunk, True)])
def test_equals_the_plain_loss(f, weighted):
    """Value and gradients, in f64, also with weights of tokens; the second value is the sum of the weights or of the mask."""
    with jax.enable_x64(True):
        hidden, weight, labels, mask = make_inputs()
        arrays = hidden, weight, labels, make_weights(mask) if weighted else mask
        found, expected = (with_gradients(each, *arrays) for each in (f, plain_sums))
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-12)
        for actual, wanted in zip(found[2:], expected[2:], strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-12)


def test_weights_0_and_1_are_a_mask():
    """They give a mask's bits, and hide labels outside the vocabulary; weights of 2 give twice the values."""
    hidden, weight, labels, mask = make_inputs(jnp.bfloat16)
    labels = jnp.where(mask, labels, -100)

    def of(mask):
        return with_gradients(in_chunks, hidden, weight, labels, mask)

    jax.tree.map(np.testing.assert_array_equal, of(mask.astype(jnp.float32)), of(mask))
    doubled = jax.tree.map(lambda x: 2 * x, of(mask))
    jax.tree.map(np.testing.assert_array_equal, of(2 * mask.astype(jnp.float32)), doubled)


def test_a_factor_on_all_weights():
    """It changes nothing in the mean, up to the factors that a message's weight may have, and many labels."""
    hidden, weight, labels, mask = (jnp.tile(x, (256, 1) if x.ndim == 2 else 256) for x in make_inputs(jnp.bfloat16))
    weight = weight[:53]

    @jax.jit
    def of(weights):
        def mean(hidden, weight):
            total, divisor = cross_entropy(hidden, weight, labels, weights)
            return total / divisor

        return jax.value_and_grad(mean, (0, 1))(hidden, weight)

    weights = make_weights(mask)
    for factor in (SMALLEST_WEIGHT, LARGEST_WEIGHT):
        jax.tree.map(np.testing.assert_array_equal, of(factor * weights), of(weights))


def test_replicated_head():
    """Inside `shard_map` the head's gradient is summed over the devices, and nothing else but the loss is."""
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    mask = make_weights(mask)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def of_shard(hidden, weight, labels, mask):
        return jax.lax.psum(cross_entropy(hidden, weight, labels, mask, chunk_tokens=10)[0], "data")

    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(P("data"), P(), P("data"), P("data")), out_specs=P())
    gradient = jax.jit(jax.grad(sharded, argnums=(0, 1)))
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(hidden, weight, labels, mask)
    for actual, wanted in zip(gradient(hidden, weight, labels, mask), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    text = str(gradient.trace(hidden, weight, labels, mask).jaxpr)
    assert len(re.findall(r"\bpsum\w*\[", text)) == 2, "the loss and the head's gradient"


def test_labels_outside_the_vocabulary():
    """One makes the loss NaN, unless its token is masked out: then it changes nothing."""
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    at, loss = int(jnp.argmax(mask)), jax.jit(lambda labels, mask: cross_entropy(hidden, weight, labels, mask)[0])
    without = mask.at[at].set(False)
    for label in (-1, 53, -100):
        wild = labels.at[at].set(label)
        assert jnp.isnan(loss(wild, mask)) and loss(wild, without) == loss(labels, without)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_operands(dtype):
    """They accumulate in f32, and gradients have the dtypes of the arguments."""
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    hidden = hidden.astype(dtype)
    weight = weight.astype(dtype).astype(jnp.float32)

    def mean(loss_sum):
        return lambda h, w: loss_sum(h, w, labels, mask) / 1e4

    chunked = mean(lambda *a: cross_entropy(*a, chunk_tokens=5)[0])
    loss, (d_hidden, d_weight) = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(hidden, weight)
    assert d_hidden.dtype == dtype and loss.dtype == d_weight.dtype == jnp.float32
    with jax.enable_x64(True):
        exact = jax.jit(jax.value_and_grad(mean(plain), argnums=(0, 1)))(hidden.astype("float64"), weight.astype("float64"))
        exact_loss, exact_gradients = jax.tree.map(np.asarray, exact)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    rounding = float(jnp.finfo(dtype).eps)
    for actual, wanted in zip((d_hidden, d_weight), exact_gradients, strict=True):
        assert np.linalg.norm(np.asarray(actual, np.float64) - wanted) < rounding * np.linalg.norm(wanted)


def test_micro_batches_under_remat():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    batches = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (hidden, labels, mask))

    @jax.checkpoint
    def loss(weight, hidden, labels, mask):
        return cross_entropy(jnp.tanh(hidden), weight, labels, mask, chunk_tokens=6)[0]

    def add(total, batch):
        value, gradient = jax.value_and_grad(loss)(weight, *batch)
        return jax.tree.map(jnp.add, total, (value, gradient)), None

    value, gradient = jax.jit(lambda: jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(weight)), batches)[0])()
    expected = jax.jit(jax.value_and_grad(lambda w: 2 * plain(jnp.tanh(hidden), w, labels, mask)))(weight)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-5)


def test_no_tokens():
    """The loss is 0 and the gradients are 0."""
    _, weight, labels, mask = make_inputs(jnp.float32)
    value, _, *gradients = with_gradients(in_chunks, jnp.zeros((0, 8)), weight, labels[:0], mask[:0])
    assert value == 0 and gradients[0].shape == (0, 8) and not gradients[1].any()


def test_logits_exist_by_chunk_and_once():
    """No array holds all logits. A gradient computes each chunk's logits once: three matmuls."""
    hidden, weight, labels, mask = make_inputs(jnp.float32, vocab=64)

    def loss(hidden, weight):
        return cross_entropy(hidden, weight, labels, mask, chunk_tokens=16)[0]

    value, gradient = (str(jax.make_jaxpr(f)(hidden, weight)) for f in (loss, jax.grad(loss, argnums=(0, 1))))
    for text in (value, gradient):
        assert "f32[9,64]" in text and not re.search(r"f32\[(17|18|2,9),64\]", text)
    products = [len(re.findall(r"= dot_general\[", text)) for text in (value, gradient)]
    assert products == [1, 3], "one for the logits, and one for each of two gradients"


def test_shape_errors():
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    with pytest.raises(ValueError, match=r"head_weight \[vocab, D\]; got \(17, 8\) and \(53, 7\)"):
        cross_entropy(hidden, weight[:, :7], labels, mask)
    with pytest.raises(ValueError, match=r"labels and mask must have shape \(17,\)"):
        cross_entropy(hidden, weight, labels[:3], mask)


def test_frozen_head():
    """Its gradient is not computed, and the other gradient is the same."""
    hidden, weight, labels, mask = make_inputs(jnp.float32)
    of_both, of_hidden = (jax.grad(lambda h, w: cross_entropy(h, w, labels, mask)[0], asked) for asked in ((0, 1), (0,)))
    np.testing.assert_array_equal(*(jax.jit(f)(hidden, weight)[0] for f in (of_hidden, of_both)))
    products = [str(jax.make_jaxpr(f)(hidden, weight)).count("dot_general") for f in (of_both, of_hidden)]
    assert products == [3, 2]
