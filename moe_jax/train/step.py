"""One optimizer step as a pure, jitted function from (state, batch) to (state, metrics)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from moe_jax.models.qwen3 import Qwen3
from moe_jax.train.loss import Batch, LossParts, loss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes: `step` counts finished steps; `params` is `nnx.split(model, nnx.Param)[1]`."""

    step: Int[Array, ""]
    params: nnx.State
    opt_state: optax.OptState


def init_state(model: Qwen3, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. It shares the model's arrays, and the first train step takes them over."""
    params = nnx.state(model, nnx.Param)
    # Committed to their devices, as a restored state is, so that both run the same compiled step.
    params = jax.tree.map(lambda p: jax.device_put(p, p.sharding), params)
    opt_state = optimizer.init(_as_f32(params))
    everywhere = _replicated(params)
    opt_state = jax.tree.map(lambda x: jax.device_put(x, x.sharding if x.ndim else everywhere), opt_state)
    return TrainState(jax.device_put(jnp.zeros((), jnp.int32), everywhere), params, opt_state)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule | None = None,
    aux_loss_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    gradient_accumulation: int = 1,
    remat: bool = True,
    force_balanced_routing: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """A jitted step(state, batch) -> (state, metrics). The state passed in is donated: its arrays are gone afterwards.

    With `gradient_accumulation` n the batch runs as n micro-batches, whose gradients are summed in f32. Cross-entropy is
    divided by the labels of the whole batch, so n does not change it; the router losses are means over micro-batches,
    each balanced within itself.

    Args:
      graphdef: `nnx.split(model, nnx.Param)[0]`.
      schedule: the learning rate, for the metrics only.

    Returns:
      metrics are f32 scalars: loss (cross-entropy a label), aux_loss, z_loss, total_loss, grad_norm (before clipping),
      num_labels, num_tokens (without padding), learning_rate if there is a schedule; and expert_load [moe_layers, E] int32.
    """

    def micro_loss(params, batch, num_labels):
        return loss(
            nnx.merge(graphdef, params),
            batch,
            aux_loss_coef=aux_loss_coef,
            z_loss_coef=z_loss_coef,
            num_labels=num_labels,
            router_share=1 / gradient_accumulation,
            remat=remat,
            force_balanced_routing=force_balanced_routing,
        )

    def gradients(params, batch, num_labels) -> tuple[Array, LossParts, nnx.State]:
        (total, parts), grads = jax.value_and_grad(micro_loss, has_aux=True)(params, batch, num_labels)
        return total, parts, _as_f32(grads)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        num_labels = (batch["loss_mask"] != 0).sum().astype(jnp.float32)
        batch = {name: batch[name] for name in ("tokens", "labels", "loss_mask", "positions", "segment_ids")}
        total, parts, grads = _summed(partial(gradients, state.params), batch, num_labels, gradient_accumulation)
        masters = _as_f32(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, masters)
        params = jax.tree.map(lambda p, master, u: (master + u).astype(p.dtype), state.params, masters, updates)
        metrics = {
            "loss": parts.cross_entropy / num_labels.clip(1),
            "aux_loss": parts.aux_loss / gradient_accumulation,
            "z_loss": parts.z_loss / gradient_accumulation,
            "total_loss": total,
            "grad_norm": optax.tree.norm(grads),
            "num_labels": num_labels,
            "num_tokens": parts.num_tokens,
            "expert_load": parts.expert_load,
        }
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step)
        return TrainState(state.step + 1, params, opt_state), metrics

    compiled: list[Callable] = []

    def jitted_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        if not compiled:
            # The state leaves laid out as it came: XLA's own choice could differ, and the next step would compile again.
            layout = jax.tree.map(lambda x: x.sharding, state)
            compiled.append(jax.jit(train_step, donate_argnums=0, out_shardings=(layout, None)))
        return compiled[0](state, batch)

    return jitted_step


def put_batch(batch: dict[str, np.ndarray], params: nnx.State) -> dict[str, jax.Array]:
    """The batch on the devices that hold the parameters, its rows split over the mesh axes `data` and `fsdp`."""
    sharding = _replicated(params)
    if isinstance(sharding, NamedSharding):
        rows = len(next(iter(batch.values())))
        axes: list[str] = []
        for axis in ("data", "fsdp"):
            ways = sharding.mesh.shape.get(axis, 1)
            if rows % ways == 0:
                rows, axes = rows // ways, [*axes, axis]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))
    return jax.device_put(batch, sharding)


def _summed(gradients, batch: Batch, num_labels, micro_batches: int):
    """(total, parts, grads) summed over the micro-batches."""
    if micro_batches == 1:
        return gradients(batch, num_labels)

    def strided(x):
        # Micro-batch i has the rows i, i+n, ...: each stays spread over the same devices as the whole batch.
        if x.shape[0] % micro_batches:
            raise ValueError(f"the batch has {x.shape[0]} rows, which gradient_accumulation={micro_batches} does not divide")
        return x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    stacked = jax.tree.map(strided, batch)
    shapes = jax.eval_shape(gradients, jax.tree.map(lambda x: x[0], stacked), num_labels)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(sums, micro_batch):
        return jax.tree.map(jnp.add, sums, gradients(micro_batch, num_labels)), None

    return jax.lax.scan(add, zeros, stacked)[0]


def _as_f32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _replicated(params: nnx.State):
    """The sharding that puts a whole array on every device of the parameters."""
    sharding = jax.tree.leaves(params)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
