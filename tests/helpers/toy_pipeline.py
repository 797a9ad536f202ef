"""Passes of a pipeline over numbers: stage s computes x w[s], and the loss of a micro-batch is y^2 / 2.

The backward pass divides by x, which the forward pass saved: a pass that reads zeros gives NaN, as a norm's would.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel import make_mesh
from moe_jax.parallel.pipeline.executor import PipelinePasses, from_stages, run_table, to_stages
from moe_jax.parallel.pipeline.table import lockstep_table


def toy_passes(weights, inputs, travel):
    """Totals: the value, the gradients of w of the rank's chunks, and of the inputs."""

    def forward(of_pass, x, slot):
        saved = [x] if slot is None else [slot.slots[0].at[slot.number].set(x)]
        return lambda: (travel(x) * weights[of_pass.chunk], saved, lambda totals: totals)

    def inputs_backward(of_pass, saved, dy, totals):
        return lambda: (dy * weights[of_pass.chunk], dy * saved[0] ** 2 / saved[0], totals)

    def weights_backward(of_pass, product, totals):
        value, of_weights, of_inputs = totals
        return lambda: (value, of_weights.at[of_pass.chunk].add(product), of_inputs)

    def backward(of_pass, saved, dy, totals):
        dx, product, totals = inputs_backward(of_pass, saved, dy, totals)()
        return lambda: (dx, weights_backward(of_pass, product, totals)())

    def loss(i, last_rank, y, totals):
        value, of_weights, of_inputs = totals
        y = jnp.where(jax.lax.axis_index("pipe") == last_rank, y, 0)
        return y, (value + jax.lax.psum((y * y / 2).sum(), "pipe"), of_weights, of_inputs)

    def leave(of_pass, dx, totals):
        value, of_weights, of_inputs = totals
        return value, of_weights, of_inputs.at[of_pass.micro_batch].add(jnp.where(of_pass.is_first, dx, 0))

    return PipelinePasses(
        enter=lambda i: inputs[i],
        forward=forward,
        backward=backward,
        inputs_backward=inputs_backward,
        weights_backward=weights_backward,
        run=lambda *passes: tuple(run() for run in passes),
        loss=loss,
        leave=leave,
    )


def assert_counts_once(schedule, micro_batches, travel=lambda x: x, **others):
    """Runs a step of the schedule; every stage must have counted every micro-batch once.

    Args:
      micro_batches: of both directions.
      travel: a function of each pass's input that returns it, by way of other devices.
      others: further mesh axes. Along them all devices compute the same.
    """
    ranks, stages, table = len(schedule.ranks), schedule.num_stages, lockstep_table(schedule)
    weights = 1 + np.arange(stages, dtype=np.float32) / 8
    inputs = 1 + np.arange(micro_batches, dtype=np.float32) / 4

    def local(stored):
        everywhere = [jax.lax.axis_index(axis) for axis in ("pipe", *others)]
        own, x = vary_as((to_stages(stored[:, 0], schedule), jnp.asarray(inputs)), everywhere)
        zeros = jnp.zeros(()), *jax.tree.map(jnp.zeros_like, (own, x))
        zeros = vary_as(zeros[0], everywhere[1:]), *zeros[1:]
        value, of_weights, of_inputs = run_table(toy_passes(own, x, travel), table, zeros)
        home = from_stages(of_weights, schedule)[:, None]
        return jax.lax.pmean((value, home, jax.lax.psum(of_inputs, "pipe")), tuple(others))

    devices = jax.devices()[: ranks * int(np.prod(list(others.values())))]
    mesh, layout = make_mesh(pipe=ranks, **others, devices=devices), PartitionSpec(None, "pipe")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=layout, out_specs=(PartitionSpec(), layout, PartitionSpec())))
    value, of_weights, of_inputs = run(jnp.asarray(weights).reshape(stages // ranks, ranks))

    product = weights.prod()
    y = inputs * product
    np.testing.assert_allclose(value, (y * y / 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(of_inputs, y * product, rtol=1e-5)
    np.testing.assert_allclose(of_weights.reshape(-1), (y * y).sum() / weights, rtol=1e-5)
