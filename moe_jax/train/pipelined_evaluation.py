"""An objective's value and aux where the layers lie in a pipeline, without gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.layers.router_sums import RouterSums
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.executor import ForwardPasses, run_forward_ticks
from moe_jax.train.batch import Batch, micro_batches_of
from moe_jax.train.gradients import zeros_of
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model, on_devices
from moe_jax.train.overlap import check_objective
from moe_jax.train.pipeline_front import Front
from moe_jax.train.pipeline_passes import RankPasses, check_chunks, fp8_copies_of_rank, join_chunks, passes_of_layers


class Evaluated(NamedTuple):
    """An objective's value and aux, summed over micro-batches and devices."""

    value: Float[Array, ""]
    aux: Any


def evaluate_pipelined(
    objective: Objective, graphdef: nnx.GraphDef, parallelism: Parallelism, micro_batches: int
) -> Callable[[nnx.State, nnx.State, Batch], Evaluated]:
    """Returns evaluated(params, fixed, batch), whose micro-batches flow through the ranks one behind another.

    Arguments, micro-batches and errors as in `pipelined.accumulate_pipelined`, and value and aux equal those. Layers keep
    nothing for a backward pass. A step of m micro-batches takes m v + p - 1 ticks, if the p ranks divide m: with few
    micro-batches most ranks wait.
    """
    check_objective(objective, "a pipeline")
    ranks, chunks = parallelism.mesh.shape["pipe"], parallelism.pipe_chunks

    def of_device(model: Decoder, batch: Batch) -> Evaluated:
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        (fixed,) = rest
        # With remat a chunk saves its layers' inputs alone, and XLA removes a stack that nothing reads.
        execution = replace(model.execution, remat=True)
        micro = passes_of_layers(objective, graph, join_chunks(params)[0], fixed, execution, parallelism.mesh)
        stacked, scalars = micro_batches_of(batch, micro_batches)
        copies = fp8_copies_of_rank(micro, parallelism.mesh)
        passes = RankPasses(micro, chunks, stacked, scalars, Front(micro, stacked).forward(), copies=copies)
        return _evaluated(passes, micro_batches)

    on_mesh = on_devices(of_device, graphdef, parallelism=parallelism)

    def evaluated(params: nnx.State, fixed: nnx.State, batch: Batch) -> Evaluated:
        check_chunks(merged_model(graphdef, params, fixed), ranks, chunks)
        return on_mesh(params, fixed, batch)

    return evaluated


class _Totals(NamedTuple):
    """Sums over the micro-batches, on a rank."""

    of_tokens: Evaluated
    router: RouterSums | None
    """The sums of the rank's layers, stacked."""


def _evaluated(passes: RankPasses, micro_batches: int) -> Evaluated:
    """Runs the rank's passes."""

    def forward(of_tick, moving):
        ((output, _, count),) = passes.run(passes.forward(of_tick, moving))
        return output, count

    def loss(i, finished, totals: _Totals) -> _Totals:
        return totals._replace(of_tokens=jax.tree.map(jnp.add, totals.of_tokens, Evaluated(*passes.value_of(i, finished))))

    zeros = zeros_of(jax.eval_shape(lambda: Evaluated(*passes.value_of(0, passes.enter(0)))))
    start = _Totals(zeros, passes.zeros_of_layers())
    totals = run_forward_ticks(ForwardPasses(passes.enter, forward, loss), passes.chunks, micro_batches, start)
    value, aux = totals.of_tokens
    return Evaluated(value, passes.aux_of_layers(aux, totals.router))
