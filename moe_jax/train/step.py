"""One optimizer step as a pure, jitted function from (state, batch) to (state, metrics).

The step composes pieces that can be used alone: `on_devices`, `gradients_fn`, `accumulate`, `apply_gradients`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from moe_jax.layers.lora import has_dropout
from moe_jax.layers.passes import Remat
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.zero1 import optimizer_mesh, sum_to_parts
from moe_jax.train.batch import Batch, num_rows, total_weight
from moe_jax.train.compiled_step import Metrics, StepRemat, TrainStep, planned_step
from moe_jax.train.gradients import GradientsFn, accumulate, accumulate_in_place, gradients_fn
from moe_jax.train.micro_batch import accumulate_overlapping
from moe_jax.train.objective import LossFunction, NextToken, Objective, as_objective, can_overlap, expert_bias_range
from moe_jax.train.on_devices import with_dropout_seeds, with_fp8_copies
from moe_jax.train.pipelined import accumulate_pipelined
from moe_jax.train.state import TrainState, apply_gradients

COUNTED = {"num_labels": "loss_mask", "num_tokens": "segment_ids"}
"""{metric: the array whose nonzero entries it counts}."""


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Objective | LossFunction | None = None,
    *,
    schedule: optax.Schedule | None = None,
    gradient_accumulation: int = 1,
    remat: StepRemat = True,
    force_balanced_routing: bool = False,
    parallelism: Parallelism | None = None,
) -> TrainStep:
    """Returns a jitted step(state, batch) -> (state, metrics). The state passed in is donated: its arrays are gone afterwards.

    Frozen weights under adapters are not donated: the returned state holds the same arrays. Dropout of adapters depends on the
    step's number (`train.on_devices`).

        step = train.make_train_step(graphdef, optimizer, train.NextToken(train.LossWeights(aux_loss_coef=0.001)))

    With `gradient_accumulation` n the batch runs as n micro-batches, whose gradients are summed in f32. On one device the
    kernels add the experts' gradients to their sums, unrounded and without a second array of the experts' size. Cross-entropy
    is divided by the labels of the whole batch, so n does not change it. A loss_mask of f32 weights the labels: the divisor is
    then the sum of their weights. The router losses are means over micro-batches, each balanced within itself.

    Args:
      graphdef: `nnx.graphdef(model)`.
      loss: `NextToken(LossWeights(...))`; default: `NextToken()`. Or a function
        loss(model, batch) -> (a scalar, a dict of scalar metrics). It is called on each micro-batch, with all arrays of the
        batch. "num_labels" is added: the whole batch's labels / the number of micro-batches. So is "label_weight", from the sum
        of the labels' weights. Scalars and metrics are averaged over micro-batches. With `parallelism` the function is called
        on each device inside `jax.shard_map`, with that device's tokens. It must return the same on all devices:

            def loss(model, batch):
                log_probs = train.log_probs(model, batch)
                mean = train.sum_over_devices(model, log_probs.sum()) / batch["num_labels"]
                return -mean, {"mean_log_prob": mean}

        Arrays that the function closes over are compiled in as constants. A teacher's or a reference model's log-probabilities
        belong in the batch (examples/distillation.py). Biases of experts do not change. Extra arrays are [batch, ...]; if
        sequences are split over devices, [batch] or [batch, seq, ...].
      schedule: the learning rate, for the metrics only.
      gradient_accumulation: the number of micro-batches.
      remat: recompute each layer in the backward pass and keep only its input. "offload" keeps the inputs in the host's memory.
        A number n recomputes all layers but the last n, which keep all their residuals: more memory and less time. Parts after
        the number are kept by the other layers, as in "12,router,attention,experts" (docs/scaling.md). "auto" chooses what fits
        into the device's memory (`train.compiled_step`), and keeps nothing if the memory is unknown, as on CPUs.
      force_balanced_routing: deal tokens to experts in turn and ignore the router's choice. For benchmarks only.
      parallelism: the state's mesh, and how the model is spread over it. Losses, gradients and metrics equal the whole batch's
        on one device. With `shard_optimizer` the state must come from `init_state(..., parallelism)`. None: one device, or all
        collectives left to XLA.

    Returns:
      A step whose metrics are f32 scalars, unless the name has a shape:

      - loss: cross-entropy per label, or the mean weighted by the labels' weights.
      - aux_loss, sequence_loss, z_loss: the router's losses. sequence_loss is 0 if its coefficient is 0.
      - mtp_loss: cross-entropy of the multi-token prediction (MTP) modules; 0 without any.
      - total_loss, grad_norm (before clipping), num_labels, num_tokens (without padding).
      - learning_rate, if there is a schedule.
      - router_entropy [moe_layers]: mean over tokens, in nats.
      - num_rounds, num_shadows [moe_layers]: of `parallel.expert.Exchange`, means over devices and micro-batches.
      - expert_bias_range [moe_layers, 2]: smallest and largest bias after the step, if there are biases.
      - expert_load [moe_layers, E], int32. MTP modules' layers are the last of moe_layers.
      - num_dropped, int32: choices that no expert computed, over all layers. 0 unless `ExpertParallel.drop` is set.

      With a function as `loss` the metrics are the function's own, total_loss, grad_norm and learning_rate. loss is the
      function's value unless one of its metrics has that name. num_labels and num_tokens exist if the batch has a loss_mask and
      segment_ids.

    Raises:
      TypeError: a function that cannot be called as loss(model, batch); or any function as `loss` with
        gradient accumulation and `overlap_micro_batches=True`.
      ValueError: at the first step, a function that returns something else. A function for a model with MTP modules, or
        `NextToken` with an `mtp_loss_coef` of 0 for such a model. Rows that cannot be divided among the micro-batches and
        devices. A state whose optimizer is not split as `parallelism` requires.
    """
    objective = as_objective(NextToken() if loss is None else loss, gradient_accumulation)
    # If `data` splits the optimizer's state, gradients are summed over `data` once a step, and only in parts.
    split_over = optimizer_mesh(parallelism)
    pipelined = parallelism is not None and parallelism.pipelined
    overlap = parallelism is not None and overlaps(objective, parallelism, remat, gradient_accumulation)

    def train_step(
        functions: tuple[GradientsFn, GradientsFn, GradientsFn],
        one_device: bool,
        state: TrainState,
        frozen: nnx.State,
        batch: Batch,
    ) -> tuple[TrainState, Metrics]:
        gradients, in_turn, in_place = functions
        own = replace(state, frozen=frozen).fixed
        fixed = with_fp8_copies(graphdef, state.params, own, parallelism, on_one_device=one_device)
        if parallelism is not None:
            parallelism.check_batch(num_rows(batch) // gradient_accumulation)
        counts = {name: _count(batch[array]) for name, array in COUNTED.items() if array in batch}
        label_weight = total_weight(batch["loss_mask"]) if "loss_mask" in batch else jnp.ones(())
        # Gradients of experts split over devices can be summed only after they have travelled. Adapters' gradients are small.
        compute = in_turn if frozen and not pipelined else in_place if one_device and gradient_accumulation > 1 else gradients
        prepared = objective.prepare(batch, label_weight)
        if has_dropout(model := nnx.merge(graphdef, state.params, own)):
            check_dropout(model, parallelism)
            prepared = with_dropout_seeds(prepared, state.step, parallelism)
        value, aux, grads = compute(state.params, fixed, prepared)
        if split_over is not None:
            grads = sum_to_parts(grads, split_over)
        after = apply_gradients(optimizer, state, grads, parallelism)
        after = replace(after, expert_bias=objective.move_biases(state.expert_bias, aux))
        metrics = counts | {"total_loss": value, "grad_norm": optax.tree.norm(grads)}
        metrics |= objective.metrics(value, aux, label_weight) | expert_bias_range(after.expert_bias)
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step)
        return after, metrics

    def function_of(remat: Remat | int | str) -> Callable:
        execution = Execution(balanced_routing=force_balanced_routing).with_remat(remat)
        in_turn = gradients_fn(objective, graphdef, execution, parallelism, stack_over_data=split_over is not None)
        gradients = in_turn = accumulate(in_turn, gradient_accumulation)
        if pipelined:
            assert parallelism is not None
            gradients = accumulate_pipelined(objective, graphdef, execution, parallelism, gradient_accumulation)
        elif overlap:
            gradients = accumulate_overlapping(objective, graphdef, execution, parallelism, gradient_accumulation)
        in_place = accumulate_in_place(objective, graphdef, execution, gradient_accumulation)
        return partial(train_step, (gradients, in_turn, in_place))

    plan = partial(planned_step, graphdef, parallelism, gradient_accumulation, overlap)
    return TrainStep(function_of, remat, parallelism, plan)


def overlaps(objective: Objective, parallelism: Parallelism, remat: StepRemat, micro_batches: int) -> bool:
    """Returns True if neighboring micro-batches overlap, following `Parallelism.overlap_micro_batches`."""
    if micro_batches == 1:
        return False
    if parallelism.overlap_micro_batches is not None:
        return parallelism.overlap_micro_batches
    return parallelism.expert_parallel is not None and remat is not False and can_overlap(objective)


def check_dropout(model: Decoder, parallelism: Parallelism | None) -> None:
    """Refuses dropout of adapters where a mesh would draw other masks than one device.

    Raises:
      ValueError: a pipe; or sequences are split, and latents are expanded on several devices.
    """
    if parallelism is not None and parallelism.pipelined:
        raise ValueError("dropout of adapters needs a mesh without pipe, whose passes draw no masks: use a dropout of 0")
    if parallelism is not None and parallelism.context_parallel is not None and hasattr(model.config, "kv_lora_rank"):
        raise ValueError(
            "dropout of adapters needs whole sequences, since several devices expand a token's latent (MLA): use a mesh "
            "without context, or a dropout of 0"
        )


def _count(array: Array) -> Array:
    return (array != 0).sum().astype(jnp.float32)
