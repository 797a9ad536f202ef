"""Uniform ticks on a toy: stages y = sqrt(w x) of a few numbers, each with a weight of its own.

The backward pass divides by y, which the forward pass saved: a pass that reads zeros gives NaN, as a norm's would.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.pipeline import uniform, uniform_w
from moe_jax.parallel.pipeline.executor import PipelinePasses, run_table
from moe_jax.parallel.pipeline.table import lockstep_table
from tests.helpers import seeds
from tests.helpers.meshes import make_mesh

WIDTH = 3
SIZES = [
    (2, 2, 3), (4, 1, 3),
    *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in [(2, 1, 1), (2, 1, 5), (4, 2, 2), (4, 2, 7)]),
]  # fmt: skip
"""Ranks, chunks and micro-batches: odd numbers of micro-batches, and fewer than there are ranks."""


class Sums(NamedTuple):
    """The totals of a rank. A count is of the calls that exist."""

    loss: jax.Array
    weights: jax.Array
    """The gradients of the weights, [chunks, width]."""
    inputs: jax.Array
    """The gradients of what entered, [micro-batches, width]."""
    forwards: jax.Array
    """[chunks, micro-batches]."""
    backwards: jax.Array
    """[chunks, micro-batches]."""
    losses: jax.Array
    """[micro-batches]."""


def zeros(chunks, micro_batches):
    counts = jnp.zeros((chunks, micro_batches), jnp.int32)
    sums = jnp.zeros((chunks, WIDTH)), jnp.zeros((micro_batches, WIDTH))
    return Sums(jnp.zeros(()), *sums, counts, counts, counts[0])


def passes_of(weights, entering, targets, puts_off):
    """The passes of a rank. Weights are [chunks, width]; entering and targets [micro-batches, width].

    With `puts_off`, a backward pass counts where its W is.
    """

    def counted(counts, of_tick):
        return counts.at[of_tick.chunk, of_tick.micro_batch].add(jnp.where(of_tick.exists, 1, 0))

    def forward(of_tick, x, slot):
        y = jnp.sqrt(weights[of_tick.chunk] * x)
        slots = x, y
        if slot is not None:
            slots = jax.tree.map(lambda a, saved: a.at[slot.number].set(saved), slot.slots, (x, y))
        return y, slots, lambda sums: sums._replace(forwards=counted(sums.forwards, of_tick))

    def inputs_backward(of_tick, saved, dy, sums):
        x, y = saved
        return dy * weights[of_tick.chunk] / (2 * y), dy * x / (2 * y), sums

    def weights_backward(of_tick, dw, sums):
        return sums._replace(weights=sums.weights.at[of_tick.chunk].add(dw), backwards=counted(sums.backwards, of_tick))

    def backward(of_tick, saved, dy, sums):
        dx, dw, sums = inputs_backward(of_tick, saved, dy, sums)
        return dx, weights_backward(of_tick, dw, sums)

    def later(run):
        return lambda *arguments: lambda: run(*arguments)

    def loss(i, last_rank, y, sums):
        y = lax.psum(jnp.where(lax.axis_index("pipe") == last_rank, y, 0), "pipe")
        error = y - targets[i]
        return 2 * error, sums._replace(loss=sums.loss + (error**2).sum(), losses=sums.losses.at[i].add(1))

    def leave(of_tick, dx, sums):
        return sums._replace(inputs=sums.inputs.at[of_tick.micro_batch].add(jnp.where(of_tick.is_first, dx, 0)))

    return PipelinePasses(
        enter=lambda i: entering[i],
        forward=later(forward),
        backward=later(backward),
        run=lambda *passes: tuple(each() for each in passes),
        loss=loss,
        leave=leave,
        inputs_backward=later(inputs_backward) if puts_off else None,
        weights_backward=later(weights_backward) if puts_off else None,
    )


def plain_loss(weights, entering, targets):
    """The loss of weights [chunks, ranks, width], with the stages one after the other."""
    x = entering
    for w in weights.reshape(-1, WIDTH):
        x = jnp.sqrt(w * x)
    return ((x - targets) ** 2).sum()


@pytest.mark.parametrize("ranks, chunks, micro_batches", SIZES)
@pytest.mark.parametrize("puts_off", [False, True])
def test_sums(ranks, chunks, micro_batches, puts_off):
    """Loss and gradients equal the stages run one after another, and every pass adds once; also with W put off."""
    numbers = seeds.rng().uniform(0.5, 2, (chunks * ranks + 2 * micro_batches, WIDTH)).astype(np.float32)
    weights, entering, targets = np.split(numbers, [chunks * ranks, chunks * ranks + micro_batches])
    weights = weights.reshape(chunks, ranks, WIDTH)
    table = lockstep_table((uniform_w if puts_off else uniform)(ranks, chunks, micro_batches))

    def on_rank(weights, entering, targets):
        arrays = vary_as((weights[:, 0], entering, targets), weights)
        totals = run_table(passes_of(*arrays, puts_off), table, vary_as(zeros(chunks, micro_batches), weights))
        return jax.tree.map(lambda a: a[None], totals)

    specs = PartitionSpec(None, "pipe"), PartitionSpec(), PartitionSpec()
    call = jax.shard_map(on_rank, mesh=make_mesh(pipe=ranks), in_specs=specs, out_specs=PartitionSpec("pipe"))
    sums = jax.tree.map(np.asarray, jax.jit(call)(weights, entering, targets))
    loss, (of_weights, of_entering) = jax.value_and_grad(plain_loss, (0, 1))(weights, entering, targets)

    np.testing.assert_array_equal(sums.forwards, 1)
    np.testing.assert_array_equal(sums.backwards, 1)
    np.testing.assert_array_equal(sums.losses, 1)
    np.testing.assert_allclose(sums.loss, np.full(ranks, loss), rtol=1e-5)
    np.testing.assert_allclose(sums.weights.swapaxes(0, 1), of_weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums.inputs[0], of_entering, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sums.inputs[1:], 0)
