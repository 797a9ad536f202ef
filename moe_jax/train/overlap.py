"""Micro-batches that overlap: the forward pass of one beside the backward pass of the one before, in one loop over the layers.

A turn of the loop computes layer l forward for micro-batch i + 1 and layer n - 1 - l backward for micro-batch i. Tokens of one
pass travel to the experts of other devices while the other pass computes. This is the order of Megatron's combined 1F1B without
a pipeline, and of DualPipe's pairs (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.2.1).

| time | 0 | 1 | ... | n |
|---|---|---|---|---|
| forward | micro-batch 0 | 1 | | |
| backward | | 0 | | n - 1 |
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.layers.passes import run_joined, run_pass
from moe_jax.models.execution import Execution
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import Batch, micro_batch_at, micro_batches_of
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh, zeros_of
from moe_jax.train.micro_batch import Forwarded, MicroBatchPasses
from moe_jax.train.objective import Objective
from moe_jax.train.state import as_f32


def accumulate_overlapping(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism | None,
    micro_batches: int,
    *,
    in_place: bool = False,
) -> GradientsFn:
    """Returns what `gradients.accumulate` returns, with passes of neighbouring micro-batches in one loop.

    Two micro-batches are in flight: memory holds what two keep for their backward passes. Parameters outside the layers are
    gathered once for all micro-batches, and their gradients are summed over devices once, in f32. So the sums of the embedding
    and of the head are whole on every device. The gradients of all embedded tokens are kept until the end of the step.

    Args:
      objective: one that has `of_states`.
      graphdef, execution, parallelism: as in `train.on_devices`.
      micro_batches: at least 2.
      in_place: as in `MicroBatchPasses`; without `parallelism` alone.

    Raises:
      ValueError: fewer than 2 micro-batches.
      TypeError: an objective that works on batches alone.
    """
    if micro_batches < 2:
        raise ValueError(f"micro_batches must be at least 2, of which one overlaps the next; got {micro_batches}")
    check_objective(objective, "overlapping micro-batches")

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        adds_in_kernel = in_place and parallelism is None
        return _sum_of(MicroBatchPasses(objective, graphdef, params, fixed, execution, adds_in_kernel), stacked, scalars)

    if parallelism is not None:
        return sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        found = sum_of(params, fixed, execution, *micro_batches_of(batch, micro_batches))
        return found._replace(gradients=as_f32(found.gradients))

    return summed


def can_overlap(objective: Objective) -> bool:
    """Returns whether the objective's computation is apart from the layers: whether its `of_states` belongs to its call.

    A subclass that has only a call of its own cannot overlap: the `of_states` that it inherits computes something else.
    """
    classes = type(objective).__mro__
    of_states, call = (
        next(place for place, kind in enumerate(classes) if name in vars(kind)) for name in ("of_states", "__call__")
    )
    return of_states <= call and classes[of_states] is not Objective


def check_objective(objective: Objective, user: str) -> None:
    """Refuses an objective whose computation is not apart from the layers. `user` is what needs that, for the message.

    Raises:
      TypeError: it has no `of_states` of its own.
    """
    if not can_overlap(objective):
        raise TypeError(
            f"an objective of {user} must have the function of_states beside its call, as train.NextToken has; a function "
            "loss(model, batch) runs the layers itself: leave overlap_micro_batches and the mesh axis pipe out"
        )


class _Carry(NamedTuple):
    """The state between two ticks."""

    x: Any
    routings: Any
    saved: list[Array]
    """The leaves of `Forwarded.saved`."""
    value: Float[Array, ""]
    aux: Any
    gradients: nnx.State


def _sum_of(passes: MicroBatchPasses, stacked: Batch, scalars: Batch) -> Gradients:
    """Sums the objective's value, aux and gradients over the micro-batches on one device."""
    joined = passes.longest_stage
    joined_behind = passes.num_stages - 1 - joined

    first = micro_batch_at(stacked, 0) | scalars
    forwarded = run_pass(passes.forward(first))
    # The loop carries leaves, because two traces of a pullback are two tree structures with the same leaves.
    leaves, structure = jax.tree.flatten(forwarded.saved)
    found = jax.eval_shape(lambda: passes.loss(first, forwarded, passes.zeros()))
    value, aux = zeros_of((found.value, found.aux))

    def loss(carry: _Carry, batch: Batch):
        saved = jax.tree.unflatten(structure, carry.saved)
        found = passes.loss(batch, Forwarded(carry.x, carry.routings, saved), carry.gradients)
        value, aux = jax.tree.map(jnp.add, (carry.value, carry.aux), (found.value, found.aux))
        return value, aux, passes.backward(batch, saved, found.dx, found.droutings, found.gradients)

    def tick(carry: _Carry, batches: tuple[Batch, Batch]):
        before, after = (batch | scalars for batch in batches)
        value, aux, backward = loss(carry, before)
        forwarded, (dx, gradients) = run_joined((passes.forward(after), joined), (backward, joined_behind))
        return _Carry(forwarded.x, forwarded.routings, jax.tree.leaves(forwarded.saved), value, aux, gradients), dx

    carry = _Carry(forwarded.x, forwarded.routings, leaves, value, aux, passes.zeros())
    neighbours = ({name: x[:-1] for name, x in stacked.items()}, {name: x[1:] for name, x in stacked.items()})
    carry, dx = jax.lax.scan(tick, carry, neighbours)
    value, aux, backward = loss(carry, micro_batch_at(stacked, -1) | scalars)
    last_dx, gradients = run_pass(backward)
    # The table is as large as several layers: its sums are read and written once, for the tokens of all micro-batches.
    dx = jnp.concatenate([dx, last_dx[None]])
    tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (stacked["tokens"], dx))
    return Gradients(value, aux, passes.embedding(tokens, dx, gradients))
