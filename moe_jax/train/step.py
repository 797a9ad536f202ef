"""One optimizer step as a pure, jitted function from (state, batch) to (state, metrics)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.precision import at_least_f32
from moe_jax.layers.balance import move_bias
from moe_jax.layers.moe import add_expert_gradients_to
from moe_jax.layers.router import ExpertBias
from moe_jax.layers.stack import Remat
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.sequence.layouts import shard_sequence
from moe_jax.train import master_weights
from moe_jax.train.loss import BATCH_ARRAYS, Batch
from moe_jax.train.objective import OwnLoss, next_tokens, own_loss, refuse_coefficients, refuse_further_predictors

COUNTED = {"num_labels": "loss_mask", "num_tokens": "segment_ids"}
"""Metrics that count an array's entries other than 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes: `step` counts finished steps; `params` is `nnx.state(model, nnx.Param)`.

    The optimizer works on f32 masters whatever the parameters' dtype: f32 parameters are their own, bf16 ones have the rest of
    theirs in `low_halves` (`train.master_weights`; None beside f32). `expert_bias` is `nnx.state(model, ExpertBias)`, empty for
    most architectures: the load moves it (`layers.balance`), no gradient and no optimizer sees it.
    `nnx.merge(graphdef, params, expert_bias)` is the model.
    """

    step: Int[Array, ""]
    params: nnx.State
    opt_state: optax.OptState
    low_halves: nnx.State | None = None
    expert_bias: nnx.State = field(default_factory=lambda: nnx.State({}))


def init_state(model: Decoder, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. It shares the model's arrays, and the first train step takes them over.

    Raises:
      ValueError: parameters that are not all f32 or all bf16.
    """
    # Committed to their devices, as a restored state is, so that both run the same compiled step.
    params, expert_bias = jax.tree.map(
        lambda p: jax.device_put(p, p.sharding), (nnx.state(model, nnx.Param), nnx.state(model, ExpertBias))
    )
    everywhere = _replicated(params)
    opt_state = _init_optimizer(optimizer, params, everywhere)
    low_halves = master_weights.initial_low_halves(params)
    return TrainState(jnp.zeros((), jnp.int32, device=everywhere), params, opt_state, low_halves, expert_bias)


def _init_optimizer(optimizer: optax.GradientTransformation, params: nnx.State, everywhere) -> optax.OptState:
    """The optimizer's state for f32 masters, each array laid out as its parameter. Compiled, so that no f32 copy is made."""

    def init(params):
        return optimizer.init(_as_f32(params))

    places = {parameter_path(path): p.sharding for path, p in jax.tree.leaves_with_path(params)}
    # The paths of moments end in their parameters'.
    layout = jax.tree.map_with_path(lambda path, _: places.get(parameter_path(path), everywhere), jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=layout)(params)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule | None = None,
    aux_loss_coef: float = 0.0,
    sequence_loss_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    expert_bias_update_rate: float = 0.001,
    mtp_loss_coef: float = 0.1,
    gradient_accumulation: int = 1,
    remat: Remat = True,
    force_balanced_routing: bool = False,
    parallelism: Parallelism | None = None,
    loss: OwnLoss | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """A jitted step(state, batch) -> (state, metrics). The state passed in is donated: its arrays are gone afterwards.

    With `gradient_accumulation` n the batch runs as n micro-batches, whose gradients are summed in f32; on one device the
    kernels add those of experts to their sums, unrounded and without a second array of that size. Cross-entropy is
    divided by the labels of the whole batch, so n does not change it; the router losses are means over micro-batches,
    each balanced within itself.

    Args:
      graphdef: `nnx.graphdef(model)`.
      schedule: the learning rate, for the metrics only.
      expert_bias_update_rate: how far a step moves each expert's bias (gamma of the DeepSeek-V3 report), for models that have
        some; 0 leaves them as they are.
      mtp_loss_coef: the factor of the loss of further tokens, for models with modules that predict some; 0 is for models
        without (`check_mtp_loss_coef`).
      remat: recompute each layer in the backward pass, and keep only its input; "offload": in the host's memory.
      parallelism: the mesh that the state lies on, and how the model is spread over it. Losses, gradients and metrics are
        those of the whole batch on one device. None: one device, or all collectives left to XLA.
      loss: what to minimise in place of `train.loss`: loss(model, batch, *, mesh_axes, **options) -> (a scalar, a dict of
        scalar metrics). It is called on each micro-batch, with all arrays that the batch has, and with "num_labels", the
        labels of the whole batch over the number of micro-batches; scalars and metrics are averaged over micro-batches.
        It passes `options` on to `train.log_probs` or `model.hidden_states`. With `parallelism` it is
        called on each device inside `jax.shard_map`, with that device's tokens, and returns what is the same on all of them:

            def loss(model, batch, *, mesh_axes, **options):
                log_probs = train.log_probs(model, batch, **options)
                mean = jax.lax.psum(log_probs.sum(), mesh_axes) / batch["num_labels"]
                return -mean, {"mean_log_prob": mean}

        Arrays that it closes over are compiled in as constants: a teacher's or a reference model's log-probabilities belong in
        the batch (examples/distillation.py). `mesh_axes` are () without `parallelism`, where `psum` does nothing. Biases of
        experts stay as they are. Arrays beside the usual ones are [batch, ...]; where sequences are split over devices,
        [batch] or [batch, seq, ...].

    Returns:
      metrics are f32 scalars: loss (cross-entropy a label), aux_loss, sequence_loss (0 if its factor is), z_loss, mtp_loss
      (cross-entropy of further tokens; 0 without modules that predict some), total_loss, grad_norm (before clipping),
      num_labels, num_tokens (without padding), learning_rate if there is a schedule; f32 router_entropy [moe_layers] (mean over
      tokens, nats), num_rounds and num_shadows [moe_layers] (of `parallel.expert.Exchange`, means over devices and
      micro-batches) and, after the step, expert_bias_range [moe_layers, 2] (smallest, largest) if there are biases; and int32:
      expert_load [moe_layers, E], num_dropped (choices that no expert computed, over all layers; 0 unless
      `ExpertParallel.drop` is set). Modules' layers are the last of moe_layers. With `loss`: its metrics, loss (its value,
      unless a metric has that name), total_loss, grad_norm, num_labels and num_tokens where the batch has a loss_mask and
      segment_ids, and learning_rate.

    Raises:
      ValueError: `loss` beside a factor of the built-in loss's. At the first step, a `loss` that returns something else, or for
        a model with modules that predict further tokens; without `loss`, an `mtp_loss_coef` of 0 for such a model; rows that
        cannot be dealt out to the micro-batches and devices.
    """

    options: dict[str, Any] = dict(remat=remat, force_balanced_routing=force_balanced_routing)
    coefficients = dict(aux_loss_coef=aux_loss_coef, sequence_loss_coef=sequence_loss_coef, z_loss_coef=z_loss_coef)
    if loss is None:
        objective = next_tokens(gradient_accumulation, mtp_loss_coef=mtp_loss_coef, **coefficients, **options)
    else:
        refuse_coefficients(**coefficients)
        objective = own_loss(loss, gradient_accumulation, **options)

    def micro_loss(params, expert_bias, batch, num_labels, totals=None, **of_mesh):
        model = nnx.merge(graphdef, params, expert_bias)
        if totals is not None:
            add_expert_gradients_to(model, totals)
        return objective.of_batch(model, batch, num_labels, **of_mesh)

    def gradients(params, expert_bias, batch, num_labels) -> tuple[Array, Any, nnx.State]:
        of_batch = jax.value_and_grad(micro_loss, has_aux=True)
        if parallelism is not None:
            dtype = nnx.merge(graphdef, params, expert_bias).dtype
            of_batch = _on_mesh(micro_loss, parallelism, params, dtype, batch)
        (total, parts), grads = of_batch(params, expert_bias, batch, num_labels)
        return total, parts, _as_f32(grads)

    def train_step(adds_in_place: bool, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        model = nnx.merge(graphdef, state.params, state.expert_bias)
        if loss is None:
            check_mtp_loss_coef(model.config, mtp_loss_coef)
        else:
            refuse_further_predictors(model.config)
        if parallelism is not None:
            parallelism.check_batch(_num_rows(batch) // gradient_accumulation)
        counted = {name: batch[array] for name, array in COUNTED.items() if array in batch}
        counts = {name: (array != 0).sum().astype(jnp.float32) for name, array in counted.items()}
        num_labels = counts.get("num_labels", jnp.ones(()))
        if loss is None:
            batch = {name: batch[name] for name in BATCH_ARRAYS}
        if adds_in_place:
            of_batch = partial(micro_loss, expert_bias=state.expert_bias, num_labels=num_labels)
            dtype = at_least_f32(model.dtype)
            total, parts, grads = _summed_in_place(of_batch, state.params, dtype, batch, gradient_accumulation)
        else:
            of_batch = partial(gradients, state.params, state.expert_bias, num_labels=num_labels)
            total, parts, grads = _summed(of_batch, batch, gradient_accumulation)
        split = state.low_halves is not None
        masters = master_weights.join(state.params, state.low_halves) if split else _as_f32(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, masters)
        masters = optax.apply_updates(masters, updates)
        params, low_halves = master_weights.split(masters) if split else (masters, None)
        expert_bias = state.expert_bias
        if loss is None:
            expert_bias = move_expert_bias(expert_bias, parts.expert_load, expert_bias_update_rate)
        metrics = {**counts, "total_loss": total, "grad_norm": optax.tree.norm(grads)}
        metrics |= objective.metrics(total, parts, num_labels)
        if stages := jax.tree.leaves(expert_bias):
            biases = jnp.concatenate(stages)
            metrics["expert_bias_range"] = jnp.stack([biases.min(axis=1), biases.max(axis=1)], axis=1)
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step)
        return TrainState(state.step + 1, params, opt_state, low_halves, expert_bias), metrics

    compiled: list[Callable] = []

    def jitted_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        if not compiled:
            # The state leaves laid out as it came: XLA's own choice could differ, and the next step would compile again.
            layout = jax.tree.map(lambda x: x.sharding, state)
            # Split over devices, gradients of experts are added up after they have travelled.
            one_device = parallelism is None and len(jax.tree.leaves(state.params)[0].sharding.device_set) == 1
            step = partial(train_step, one_device and gradient_accumulation > 1)
            # Metrics are whole on every device, so that each process can read them.
            shardings = layout, _replicated(state.params)
            options = None if parallelism is None else parallelism.compiler_options
            compiled.append(jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=options))
        return compiled[0](state, batch)

    return jitted_step


def check_mtp_loss_coef(config: ModelConfig, mtp_loss_coef: float) -> None:
    """Whether modules that predict further tokens, if the model has some, learn too.

    Raises:
      ValueError: the factor of their loss is 0. Weight decay would shrink them, and of modules that are not run the load is not
        known, by which biases move.
    """
    if config.mtp_stages and not mtp_loss_coef:
        raise ValueError(
            "mtp_loss_coef=0 would leave the model's modules that predict further tokens behind while the model changes; "
            "give them a factor, or load the model without them: from_pretrained(..., mtp=False)"
        )


def put_batch(batch: dict[str, np.ndarray], params: nnx.State, parallelism: Parallelism | None = None) -> dict[str, jax.Array]:
    """The batch on the devices that hold the parameters, rows and sequences split as `parallelism` says.

    Without it, rows are split over the mesh axes `data` and `fsdp` as far as these divide them. Each of several processes
    passes a batch of all rows and puts the parts of its own devices there; other rows may hold anything
    (`Parallelism.own_rows`). Arrays are [batch, seq, ...], or, for a loss of one's own, [batch].

    Raises:
      ValueError: arrays differ in their number of rows, or one has none.
    """
    shapes = {name: np.shape(array) for name, array in batch.items()}
    if () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"all arrays of a batch must be [batch, ...], of the same number of rows; got the shapes {shapes}")
    if parallelism is None:
        sharding = _split_rows(_num_rows(batch), _replicated(params))
        return _put(batch, dict.fromkeys(batch, sharding))
    if (context := parallelism.context_parallel) is not None:
        ways = parallelism.mesh.shape[context.axis_name]
        batch = jax.tree.map(lambda x: x if x.ndim < 2 else shard_sequence(x, ways, context.layout), batch)
    parallelism.check_batch(_num_rows(batch))
    return _put(batch, {name: NamedSharding(parallelism.mesh, spec) for name, spec in _batch_specs(batch, parallelism).items()})


def _put(batch: dict[str, np.ndarray], shardings: dict[str, Sharding]) -> dict[str, jax.Array]:
    if all(sharding.is_fully_addressable for sharding in shardings.values()):
        return jax.device_put(batch, shardings)
    # Here device_put would send every batch to all processes first, to see that it is the same everywhere.
    return {name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__) for name, x in batch.items()}


def _num_rows(batch: dict[str, Any]) -> int:
    return next(iter(batch.values())).shape[0]


def _batch_specs(batch: dict[str, Any], parallelism: Parallelism) -> dict[str, PartitionSpec]:
    """`Parallelism.batch_spec` of each array, which may have rows alone."""
    return {name: PartitionSpec(*parallelism.batch_spec[: array.ndim]) for name, array in batch.items()}


def _split_rows(rows: int, sharding):
    """A sharding of so many rows on the devices of `sharding`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes: list[str] = []
    for axis in ("data", "fsdp"):
        ways = sharding.mesh.shape.get(axis, 1)
        if rows % ways == 0:
            rows, axes = rows // ways, [*axes, axis]
    return NamedSharding(sharding.mesh, PartitionSpec(tuple(axes)))


def move_expert_bias(expert_bias: nnx.State, expert_load: Int[Array, "moe_layers experts"], rate: float) -> nnx.State:
    """`layers.balance.move_bias` of each stage's biases, [layers, experts] each, whose layers in turn are those of the load.

    Raises:
      ValueError: biases for more or fewer layers.
    """
    biases, structure = jax.tree.flatten(expert_bias)
    if not biases or rate == 0:
        return expert_bias
    ends = np.cumsum([len(bias) for bias in biases])
    if ends[-1] != len(expert_load):
        raise ValueError(f"the model has biases for {ends[-1]} of its {len(expert_load)} layers with experts; all need one")
    loads = jnp.split(expert_load, ends[:-1])
    return jax.tree.unflatten(structure, [move_bias(bias, load, rate) for bias, load in zip(biases, loads, strict=True)])


def _on_mesh(micro_loss, parallelism: Parallelism, params: nnx.State, dtype: jnp.dtype, batch: Batch):
    """`jax.value_and_grad` of the loss with each device computing on its own tokens and its part of the parameters."""
    mesh = parallelism.mesh
    sharded = ShardedParameters.of(params, mesh, dtype=dtype, token_axes=parallelism.token_axes, hops=parallelism.hops)

    def local(params, expert_bias, batch, num_labels):
        def of_parts(params):
            return micro_loss(sharded.enter(params), expert_bias, batch, num_labels, **mesh_options(parallelism, sharded))

        return jax.value_and_grad(of_parts, has_aux=True)(params)

    in_specs = sharded.specs, PartitionSpec(), _batch_specs(batch, parallelism), PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(PartitionSpec(), sharded.specs))


def mesh_options(parallelism: Parallelism, sharded: ShardedParameters) -> dict[str, Any]:
    """What `loss` is told where each device has its own tokens and parts of the parameters."""
    return dict(
        context_parallel=parallelism.context_parallel,
        expert_parallel=parallelism.expert_parallel,
        layer_gathers=sharded.layers,
        mesh_axes=parallelism.token_axes,
    )


def _summed(gradients, batch: Batch, micro_batches: int):
    """(total, parts, grads) summed over the micro-batches."""
    if micro_batches == 1:
        return gradients(batch=batch)
    stacked = _split(batch, micro_batches)

    def add(sums, micro_batch):
        return jax.tree.map(jnp.add, sums, gradients(batch=micro_batch)), None

    return jax.lax.scan(add, _zeros(gradients, stacked), stacked)[0]


def _summed_in_place(micro_loss, params: nnx.State, dtype: jnp.dtype, batch: Batch, micro_batches: int):
    """As `_summed`, for parameters on one device: the kernels add the gradients of experts to their sums, in `dtype`.

    So these are not rounded to the parameters' dtype before, and no second array of the experts' size holds them.
    """
    weights, others = nnx.split_state(params, lambda path, _: "experts" in path, ...)
    stacked = _split(batch, micro_batches)

    def gradients(totals, batch):
        def of_micro_batch(others, totals):
            return micro_loss(nnx.merge_state(weights, others), batch=batch, totals=totals)

        (total, parts), (grads, totals) = jax.value_and_grad(of_micro_batch, (0, 1), has_aux=True)(others, totals)
        return (total, parts, _as_f32(grads)), totals

    def add(carry, micro_batch):
        sums, totals = carry
        found, totals = gradients(totals, micro_batch)
        return (jax.tree.map(jnp.add, sums, found), totals), None

    totals = jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), weights)
    zeros = _zeros(lambda batch: gradients(totals, batch)[0], stacked)
    ((total, parts, grads), totals), _ = jax.lax.scan(add, (zeros, totals), stacked)
    return total, parts, nnx.merge_state(grads, _as_f32(totals))


def _split(batch: Batch, micro_batches: int) -> Batch:
    """The micro-batches along a leading axis."""

    def strided(x):
        # Micro-batch i has the rows i, i+n, ...: each stays spread over the same devices as the whole batch.
        if x.shape[0] % micro_batches:
            raise ValueError(f"the batch has {x.shape[0]} rows, which gradient_accumulation={micro_batches} does not divide")
        return x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(strided, batch)


def _zeros(gradients, stacked: Batch):
    """What the sums of `gradients(batch=...)` over micro-batches begin with."""
    shapes = jax.eval_shape(lambda batch: gradients(batch=batch), jax.tree.map(lambda x: x[0], stacked))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _as_f32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _replicated(params: nnx.State):
    """The sharding that puts a whole array on every device of the parameters."""
    sharding = jax.tree.leaves(params)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
