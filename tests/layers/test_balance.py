"""The bias moves by the sign of the load's error; the loss of single sequences is the paper's, and so is its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers.balance import Sequences, move_bias, sequence_balance
from moe_jax.layers.router import route
from tests.helpers import seeds


def test_bias_step():
    """The bias moves by the sign of the load's error, layer by layer."""
    load = np.asarray([[5, 0, 1, 2], [3, 3, 3, 3], [0, 0, 0, 8]])
    bias = seeds.rng().normal(size=(3, 4)).astype(np.float32)
    moved = move_bias(jnp.asarray(bias), jnp.asarray(load), 0.25)
    step = np.asarray([[-1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, -1]], np.float32)
    np.testing.assert_array_equal(moved, bias + np.float32(0.25) * step)
    assert moved.dtype == jnp.float32


def test_bias_evens_the_load():
    """Brings a skewed router to an even load, without gradient or loss, in 400 steps over random tokens."""
    rng = np.random.default_rng(0)
    skew = jnp.asarray(rng.normal(size=8), jnp.float32)
    tokens = jnp.asarray(rng.normal(size=(400, 512, 8)), jnp.float32)

    def step(bias, logits):
        chosen = jax.lax.top_k(jax.nn.sigmoid(logits + skew) + bias, 2)[1]
        load = jnp.zeros(8, jnp.int32).at[chosen].add(1)
        return move_bias(bias, load, 0.005), load

    _, loads = jax.lax.scan(step, jnp.zeros(8), tokens)
    before, after = (np.asarray(part).sum(axis=0) for part in (loads[:20], loads[-100:]))
    assert before.max() / before.mean() > 1.5
    assert after.max() / after.mean() < 1.05


def paper(scores, ids, k):
    """Equations 17 to 20 of the DeepSeek-V3 report, summed over the sequences, and the number of sequences."""
    rows, length, experts = scores.shape
    total, count = 0.0, 0
    for row in range(rows):
        begin = 0
        while begin < length:
            end = begin
            while end < length and ids[row, end] == ids[row, begin]:
                end += 1
            if ids[row, begin] != 0:
                own, size = scores[row, begin:end], end - begin
                f, p = np.zeros(experts), np.zeros(experts)
                for t in range(size):
                    for i in np.argsort(-own[t], kind="stable")[:k]:
                        f[i] += experts / (k * size)
                    p += own[t] / own[t].sum() / size
                total, count = total + f @ p, count + 1
            begin = end
    return total, count


@pytest.mark.parametrize("k", [1, 2, 5])
def test_sequence_loss(k):
    """The loss is the paper's, for packed rows with padding."""
    rng = seeds.rng()

    @jax.jit
    def loss(scores, ids):
        sequences = Sequences.of(ids)
        flat = scores.reshape(-1, scores.shape[-1])
        balance = sequence_balance(flat / flat.sum(axis=1, keepdims=True), k, sequences)
        return balance, sequences.share(jnp.float64).sum()

    with jax.enable_x64(True):
        for num_ids in (1, 2, 3, 4, 5):
            ids, scores = rng.integers(0, num_ids, (4, 9)), rng.random((4, 9, 5)) + 1e-3
            actual = loss(jnp.asarray(scores), jnp.asarray(ids, jnp.int32))
            np.testing.assert_allclose(actual, paper(scores, ids, k), rtol=1e-12)


def test_sequence_loss_gradient():
    """The gradient flows through the mean scores alone."""
    rng = seeds.rng()
    ids = np.asarray([[1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 0, 0]])
    with jax.enable_x64(True):
        logits, sequences = jnp.asarray(rng.normal(size=(12, 5))), Sequences.of(jnp.asarray(ids, jnp.int32))
        gradient = jax.jit(jax.grad(lambda x: route(x, 2, True, sequences).sums.sequence_balance_sum))(logits)
        gradient, p = np.asarray(gradient), np.asarray(jax.nn.softmax(logits))
    expected = np.zeros((12, 5))
    for tokens in (range(3), range(3, 5), range(6, 10)):
        f = np.zeros(5)
        for t in tokens:
            f[np.argsort(-p[t])[:2]] += 5 / (2 * len(tokens))
        for t in tokens:
            expected[t] = p[t] * (f - p[t] @ f) / len(tokens)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)
    assert (gradient[5] == 0).all() and np.abs(expected).max() > 1e-3


def test_sequence_against_batch():
    """Two sequences choose a half of the experts each: the load is even over both, and uneven in each."""
    halves = np.repeat([[9.0, 9, 0, 0], [0, 0, 9, 9]], 6, axis=0)
    by_sequence = Sequences.of(jnp.asarray([[1] * 6, [1] * 6]))
    as_one = Sequences.of(jnp.ones((1, 12), jnp.int32))
    balance = jax.jit(lambda scores, sequences: sequence_balance(jax.nn.softmax(scores), 2, sequences))
    apart, together = (balance(halves, sequences) for sequences in (by_sequence, as_one))
    np.testing.assert_allclose(apart / 2, 2, rtol=1e-3)
    np.testing.assert_allclose(together, 1, rtol=1e-6)
