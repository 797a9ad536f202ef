"""The executor of tables with a chain of numbers in place of a model: each pass counts once, whatever the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
from jax.sharding import PartitionSpec

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel import make_mesh
from moe_jax.parallel.pipeline.stages import from_stages, to_stages
from moe_jax.parallel.pipeline.table import lockstep_table
from moe_jax.parallel.pipeline.table_executor import TablePasses, run_table


def toy_passes(weights, inputs):
    """Stage s computes x w[s], the loss is y^2 / 2. Totals: the value, gradients of w [chunks], and of the inputs."""

    def vary(x):
        return vary_as(x, jax.lax.axis_index("pipe"))

    def forward(of_tick, x):
        return lambda: (x * weights[of_tick.chunk], [x], lambda totals: totals)

    def inputs_backward(of_tick, saved, dy, totals):
        return lambda: (dy * weights[of_tick.chunk], saved[0] * dy, totals)

    def weights_backward(of_tick, product, totals):
        value, of_weights, of_inputs = totals
        return lambda: (value, of_weights.at[of_tick.chunk].add(product), of_inputs)

    def backward(of_tick, saved, dy, totals):
        dx, product, totals = inputs_backward(of_tick, saved, dy, totals)()
        return lambda: (dx, weights_backward(of_tick, product, totals)())

    def loss(i, last_rank, y, totals):
        value, of_weights, of_inputs = totals
        y = jnp.where(jax.lax.axis_index("pipe") == last_rank, y, 0)
        return y, (value + jax.lax.psum(y * y / 2, "pipe"), of_weights, of_inputs)

    def leave(of_tick, dx, totals):
        value, of_weights, of_inputs = totals
        return value, of_weights, of_inputs.at[of_tick.micro_batch].add(jnp.where(of_tick.exists, dx, 0))

    return TablePasses(
        enter=lambda i: vary(inputs[i]),
        forward=forward,
        backward=backward,
        inputs_backward=inputs_backward,
        weights_backward=weights_backward,
        run=lambda *passes: tuple(run() for run in passes),
        loss=loss,
        leave=leave,
    )


@pytest.mark.parametrize(
    "name, ranks, chunks, micro_batches",
    [
        ("1f1b", 4, 1, 6),
        ("interleaved", 3, 2, 5),
        ("zb-h1", 3, 1, 2),
        ("zb-v", 4, 2, 7),
        ("dualpipe", 4, 1, 10),
        ("dualpipe-v", 3, 2, 7),
    ],
)
def test_each_stage_and_micro_batch_counts_once(name, ranks, chunks, micro_batches):
    schedule = pipelines.MAKE[name](ranks, chunks, micro_batches)
    table = lockstep_table(schedule)
    stages = schedule.num_stages
    weights = 1 + np.arange(stages, dtype=np.float32) / 8
    inputs = 1 + np.arange(micro_batches, dtype=np.float32) / 4

    def local(stored):
        own = to_stages(stored[:, 0], schedule)
        totals = (jnp.zeros(()), *jax.tree.map(lambda a: vary_as(jnp.zeros_like(a), own), (own, jnp.asarray(inputs))))
        value, of_weights, of_inputs = run_table(toy_passes(own, jnp.asarray(inputs)), table, totals)
        return value, from_stages(of_weights, schedule)[:, None], jax.lax.psum(of_inputs, "pipe")

    mesh, layout = make_mesh(pipe=ranks, devices=jax.devices()[:ranks]), PartitionSpec(None, "pipe")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=layout, out_specs=(PartitionSpec(), layout, PartitionSpec())))
    value, of_weights, of_inputs = run(jnp.asarray(weights).reshape(stages // ranks, ranks))

    product = weights.prod()
    y = inputs * product
    np.testing.assert_allclose(value, (y * y / 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(of_inputs, y * product, rtol=1e-5)
    np.testing.assert_allclose(of_weights.reshape(-1), (y * y).sum() / weights, rtol=1e-5)
