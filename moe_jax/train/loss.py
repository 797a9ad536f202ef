"""The training loss: next-token cross-entropy, the router's losses that balance its load, and its z-loss.

total = ce_sum / num_labels + aux_loss_coef * load_balancing_loss + sequence_loss_coef * sequence_balance_loss
        + z_loss_coef * router_z_loss
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from moe_jax.kernels import cross_entropy
from moe_jax.layers.router import load_balancing_loss, router_z_loss, sequence_balance_loss, sum_over_mesh
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.context import ContextParallel
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import LayerGather

Batch = dict[str, Int[Array, "batch seq"]]
"""tokens, labels (the next token of the same document), loss_mask (0 or 1), positions and segment_ids, all int32."""


class LossParts(NamedTuple):
    """What the total is made of, the router's losses without their factors, and what there is to know about the routing.

    `cross_entropy` is summed over labels, `entropy_sum` over tokens; `sequence_loss` is 0 if its factor is.
    """

    cross_entropy: Float[Array, ""]
    num_labels: Float[Array, ""]
    num_tokens: Float[Array, ""]
    aux_loss: Float[Array, ""]
    sequence_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    expert_load: Int[Array, "moe_layers experts"]
    entropy_sum: Float[Array, "moe_layers"]
    num_dropped: Int[Array, ""]


def loss(
    model: Decoder,
    batch: Batch,
    *,
    aux_loss_coef: float = 0.0,
    sequence_loss_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    num_labels: Float[Array, ""] | None = None,
    router_share: float = 1.0,
    remat: bool = False,
    force_balanced_routing: bool = False,
    context_parallel: ContextParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
    layer_gathers: Sequence[LayerGather | None] | None = None,
    mesh_axes: tuple[str, ...] = (),
) -> tuple[Float[Array, ""], LossParts]:
    """The total (f32) and its parts; the [batch*seq, vocab] logits never exist.

    Args:
      num_labels: what the cross-entropy is divided by (default: the labels of this batch, at least 1). A micro-batch is
        given the labels of the whole batch, so that losses and gradients of micro-batches add up to the batch's.
      router_share: a factor on the router's losses: 1 / the number of micro-batches.
      remat, force_balanced_routing, context_parallel, expert_parallel, layer_gathers: as in `Decoder.hidden_states`.
      mesh_axes: inside `jax.shard_map`, the mesh axes over which tokens are split, that of `context_parallel` among them. The
        total and its parts are those of all their tokens, and so are gradients under `check_vma`, taken inside or outside.

    Raises:
      ValueError: `mesh_axes` lacks the axis of `context_parallel`.
    """
    if context_parallel is not None and context_parallel.axis_name not in mesh_axes:
        raise ValueError(f"mesh_axes must name the axis of context_parallel, {context_parallel.axis_name!r}; got {mesh_axes}")
    states = model.hidden_states(
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        remat=remat,
        force_balanced_routing=force_balanced_routing,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        layer_gathers=layer_gathers,
        sequence_balance=sequence_loss_coef != 0,
    )
    hidden = states.hidden.reshape(-1, states.hidden.shape[-1])
    labels, mask = batch["labels"].reshape(-1), batch["loss_mask"].reshape(-1) != 0
    summed, own_labels = cross_entropy(hidden, model.head_weight, labels, mask)
    summed, own_labels = jax.lax.psum((summed, own_labels), mesh_axes)
    router = sum_over_mesh(states.router, mesh_axes)
    aux, sequence, z = load_balancing_loss(router), sequence_balance_loss(router), router_z_loss(router)
    divisor = own_labels if num_labels is None else num_labels
    of_router = aux_loss_coef * aux + sequence_loss_coef * sequence + z_loss_coef * z
    total = summed / divisor.clip(1) + router_share * of_router
    parts = LossParts(
        cross_entropy=summed,
        num_labels=own_labels,
        num_tokens=router.num_tokens,
        aux_loss=aux,
        sequence_loss=sequence,
        z_loss=z,
        expert_load=router.expert_load,
        entropy_sum=router.entropy_sum,
        num_dropped=router.num_dropped.sum(),
    )
    return total, parts
