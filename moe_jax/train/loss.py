"""The training loss: next-token cross-entropy, the router's losses and its z-loss, and those of further tokens.

    part  = ce_sum / num_labels + aux_loss_coef * load_balancing_loss + sequence_loss_coef * sequence_balance_loss
            + z_loss_coef * router_z_loss
    total = part of the model + mtp_loss_coef * mean over its modules of (part of the module)

A module that predicts further tokens (`models.mtp`) has labels and router sums of its own. Its cross-entropy is divided by the
labels of the model, which has a few more, so that total is as in DeepSeek-V3's equations 24 and 25
(https://arxiv.org/abs/2412.19437).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels import cross_entropy
from moe_jax.layers.router import load_balancing_loss, router_z_loss, sequence_balance_loss
from moe_jax.layers.segments import has_successor, shift_left
from moe_jax.layers.stack import Remat
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.parallel.spread import Spread

Batch = dict[str, Int[Array, "batch seq"]]
"""tokens, labels (the next token of the same document), loss_mask (0 or 1), positions and segment_ids, all int32; it may have
more, as `train.batches` gives "document"."""

BATCH_ARRAYS = ("tokens", "labels", "loss_mask", "positions", "segment_ids")
"""The arrays of a batch that `loss` reads."""


class LossParts(NamedTuple):
    """What the total is made of, the router's losses without their factors, and what there is to know about the routing.

    `cross_entropy` is summed over labels, `entropy_sum` over the `routed_tokens` of each layer; `sequence_loss` is 0 if its
    factor is. `mtp_cross_entropy` is that of the modules that predict further tokens, their mean. What is of layers has those
    of the modules behind the model's, `num_dropped` counts in their choices. `num_rounds` and `num_shadows` are means over the
    devices.
    """

    cross_entropy: Float[Array, ""]
    num_labels: Float[Array, ""]
    num_tokens: Float[Array, ""]
    aux_loss: Float[Array, ""]
    sequence_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    expert_load: Int[Array, "moe_layers experts"]
    entropy_sum: Float[Array, "moe_layers"]
    routed_tokens: Float[Array, "moe_layers"]
    num_dropped: Int[Array, ""]
    num_rounds: Float[Array, "moe_layers"]
    num_shadows: Float[Array, "moe_layers"]
    mtp_cross_entropy: Float[Array, ""]


def loss(
    model: Decoder,
    batch: Batch,
    *,
    aux_loss_coef: float = 0.0,
    sequence_loss_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    mtp_loss_coef: float = 0.1,
    num_labels: Float[Array, ""] | None = None,
    router_share: float = 1.0,
    remat: Remat = False,
    force_balanced_routing: bool = False,
    context_parallel: ContextParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
    layer_gathers: Sequence[LayerGather | None] | None = None,
    mesh_axes: tuple[str, ...] = (),
) -> tuple[Float[Array, ""], LossParts]:
    """The total (f32) and its parts; the [batch*seq, vocab] logits never exist.

    Args:
      mtp_loss_coef: the factor of the modules that predict further tokens, where the model has some; 0: they are not run.
      num_labels: what the cross-entropy is divided by (default: the labels of this batch, at least 1). A micro-batch is
        given the labels of the whole batch, so that losses and gradients of micro-batches add up to the batch's.
      router_share: a factor on the router's losses: 1 / the number of micro-batches.
      remat, force_balanced_routing: as in `models.execution.Execution`.
      context_parallel, expert_parallel, layer_gathers: as in `parallel.spread.Spread`.
      mesh_axes: inside `jax.shard_map`, the mesh axes over which tokens are split, that of `context_parallel` among them. The
        total and its parts are those of all their tokens, and so are gradients under `check_vma`, taken inside or outside.

    Raises:
      ValueError: `mesh_axes` lacks the axis of `context_parallel`.
    """
    if context_parallel is not None and context_parallel.axis_name not in mesh_axes:
        raise ValueError(f"mesh_axes must name the axis of context_parallel, {context_parallel.axis_name!r}; got {mesh_axes}")
    tokens, segments = (batch["tokens"], batch["positions"], batch["segment_ids"]), batch["segment_ids"]
    execution = Execution(
        remat or model.execution.remat,
        force_balanced_routing or model.execution.balanced_routing,
        Spread(expert_parallel, context_parallel, layer_gathers, mesh_axes),
    )
    has_sequence_loss = sequence_loss_coef != 0
    states = model.hidden_states(
        *tokens,
        expert_ids="balanced" if execution.balanced_routing else None,
        remat=execution.remat,
        spread=execution.spread,
        sequence_balance=has_sequence_loss,
    )
    parts = _parts(model, states, batch["labels"], batch["loss_mask"], mesh_axes)
    divisor = (parts.num_labels if num_labels is None else num_labels).clip(1)

    def weighted(parts: LossParts) -> Float[Array, ""]:
        of_router = aux_loss_coef * parts.aux_loss + sequence_loss_coef * parts.sequence_loss + z_loss_coef * parts.z_loss
        return parts.cross_entropy / divisor + router_share * of_router

    if not (mtp_loss_coef and model.config.mtp_stages):
        return weighted(parts), parts
    modules = []
    states_of_modules = model.mtp_hidden_states(states.hidden, *tokens, execution=execution, sequence_balance=has_sequence_loss)
    for k, of_module in enumerate(states_of_modules, start=1):
        labels, mask = (shift_left(batch[name], k, context_parallel) for name in ("labels", "loss_mask"))
        modules.append(_parts(model, of_module, labels, mask * has_successor(segments, k, context_parallel), mesh_axes))
    total = weighted(parts) + mtp_loss_coef / len(modules) * sum(map(weighted, modules))
    all_parts = [parts, *modules]
    return total, parts._replace(
        expert_load=jnp.concatenate([p.expert_load for p in all_parts if p.expert_load.size]),
        entropy_sum=jnp.concatenate([p.entropy_sum for p in all_parts]),
        routed_tokens=jnp.concatenate([p.routed_tokens for p in all_parts]),
        num_dropped=jnp.stack([p.num_dropped for p in all_parts]).sum(),
        num_rounds=jnp.concatenate([p.num_rounds for p in all_parts]),
        num_shadows=jnp.concatenate([p.num_shadows for p in all_parts]),
        mtp_cross_entropy=jnp.stack([p.cross_entropy for p in modules]).mean(),
    )


def _parts(model: Decoder, states: HiddenStates, labels, mask, mesh_axes: tuple[str, ...]) -> LossParts:
    """Of the model's hidden states or of a module's, summed over the mesh."""
    hidden = states.hidden.reshape(-1, states.hidden.shape[-1])
    summed, num_labels = cross_entropy(hidden, model.head_weight, labels.reshape(-1), mask.reshape(-1) != 0)
    summed, num_labels = jax.lax.psum((summed, num_labels), mesh_axes)
    router = states.router.psum(mesh_axes)
    devices = math.prod(map(jax.lax.axis_size, mesh_axes))
    aux, sequence, z = load_balancing_loss(router), sequence_balance_loss(router), router_z_loss(router)
    return LossParts(
        cross_entropy=summed,
        num_labels=num_labels,
        num_tokens=router.num_tokens,
        aux_loss=aux,
        sequence_loss=sequence,
        z_loss=z,
        expert_load=router.expert_load,
        entropy_sum=router.entropy_sum,
        routed_tokens=jnp.full_like(router.entropy_sum, router.num_tokens),
        num_dropped=router.num_dropped.sum(),
        num_rounds=router.num_rounds / devices,
        num_shadows=router.num_shadows / devices,
        mtp_cross_entropy=jnp.zeros_like(summed),
    )
