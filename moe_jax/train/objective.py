"""The objective of a training step: next-token prediction (`train.loss`), or a function of the user's."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.shapes import varying_axes
from moe_jax.layers.balance import move_bias
from moe_jax.layers.router_sums import RouterSums
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_of_stacks, stack_of
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.layout import parameter_path
from moe_jax.train.batch import BATCH_ARRAYS, Batch, as_divisor, total_weight
from moe_jax.train.loss import LossParts, LossWeights, loss, loss_of_states

LossFunction = Callable[[Decoder, Batch], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
"""A user's loss: loss(model, batch) -> (a scalar, a dict of scalar metrics), as `make_train_step` describes it."""

TAKEN_NAMES = (
    *("step", "total_loss", "grad_norm", "learning_rate", "num_labels", "num_tokens", "tokens_per_second", "model_tflops"),
    *("eval_loss", "expert_load", "expert_bias_range"),
)
"""Names of metrics that every step has; a user's loss may not use them."""


@dataclass(frozen=True)
class Objective:
    """The function that a training step minimizes, called as objective(model, batch) -> (value, aux).

    Values, aux and gradients are summed over `micro_batches` micro-batches. A plain function becomes a `UserLoss`. Subclass it
    for your own metrics, or to move biases.
    """

    micro_batches: int = field(default=1, kw_only=True)
    """The number of micro-batches whose values the step sums; `make_train_step` sets it."""

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Returns the batch arrays that the objective reads, plus scalars shared by all micro-batches.

        Args:
          label_weight: the sum of the weights of the whole batch's labels, which is their number if all weights are 0 or 1.
        """
        raise NotImplementedError

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], Any]:
        """Returns (value, aux) of a prepared micro-batch, the same on every device of a mesh."""
        raise NotImplementedError

    @property
    def sequence_balance(self) -> bool:
        """The `sequence_balance` option of `Decoder.hidden_states` with which `of_states` must be called."""
        return False

    def of_states(self, model: Decoder, states: HiddenStates, batch: Batch) -> tuple[Float[Array, ""], Any]:
        """Computes the same as a call, from hidden states instead of tokens.

        Overlapping micro-batches need this method.
        """
        raise NotImplementedError

    def with_layers(self, aux: Any, router: RouterSums, devices: int) -> Any:
        """Returns aux with per-layer router sums filled in, where `of_states` had only their total.

        Args:
          router: sums over all micro-batches and devices.
          devices: the number of devices summed over.
        """
        return aux

    def metrics(self, value: Float[Array, ""], aux: Any, label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Computes a step's metrics from sums over its micro-batches; `label_weight` as in `prepare`."""
        raise NotImplementedError

    def move_biases(self, expert_bias: nnx.State, aux: Any) -> nnx.State:
        """Returns the updated expert biases after the step; the default leaves them unchanged."""
        return expert_bias


@dataclass(frozen=True)
class NextToken(Objective):
    """Next-token prediction by `train.loss`, with the router's losses, the MTP loss, and biases that follow the load.

    Cross-entropy is divided by the sum of the weights of the whole batch's labels. The router's losses are means over
    micro-batches.

    Attributes:
      weights: the coefficients of the losses.
      expert_bias_update_rate: how far a step moves each expert's bias (gamma of the DeepSeek-V3 report), for models that have
        biases; 0 leaves them unchanged.
    """

    weights: LossWeights = LossWeights()
    expert_bias_update_rate: float = 0.001

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Returns the arrays that `train.loss` reads, with "num_labels": the whole batch's cross-entropy divisor."""
        return {name: batch[name] for name in BATCH_ARRAYS} | {"num_labels": label_weight}

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], LossParts]:
        """Returns the micro-batch's part of the loss, and the loss's parts.

        Raises:
          ValueError: the model has multi-token prediction modules and the coefficient of their loss is 0.
        """
        check_mtp_loss_coef(model.config, self.weights.mtp_loss_coef)
        return loss(model, batch, self.weights, num_labels=batch["num_labels"], router_share=1 / self.micro_batches)

    @property
    def sequence_balance(self) -> bool:
        """True if the loss includes the balance loss within sequences."""
        return self.weights.sequence_loss_coef != 0

    def of_states(self, model: Decoder, states: HiddenStates, batch: Batch) -> tuple[Float[Array, ""], LossParts]:
        """Computes the same as a call, from hidden states instead of tokens; same errors."""
        check_mtp_loss_coef(model.config, self.weights.mtp_loss_coef)
        options: dict[str, Any] = dict(num_labels=batch["num_labels"], router_share=1 / self.micro_batches)
        return loss_of_states(model, states, batch, self.weights, **options)

    def with_layers(self, aux: LossParts, router: RouterSums, devices: int) -> LossParts:
        """Returns the parts with the sums of all layers; rounds and shadows are means over devices."""
        rounds, shadows = router.num_rounds / devices, router.num_shadows / devices
        counts: dict[str, Any] = dict(num_tokens=aux.router.num_tokens, num_sequences=aux.router.num_sequences)
        layers = replace(router, num_rounds=rounds, num_shadows=shadows, **counts)
        # MTP modules run with the loss, so aux already has their rows.
        modules = jax.tree.map(lambda a: a[len(router.z_loss_sum) :] if a.ndim else a, aux.router)
        return aux._replace(router=RouterSums.concatenate([layers, modules]))

    def metrics(self, value: Float[Array, ""], aux: LossParts, label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Computes the metrics that `make_train_step` lists. Only this method converts `LossParts` to metrics."""
        n, router, divisor = self.micro_batches, aux.router, as_divisor(label_weight)
        return {
            "loss": aux.cross_entropy / divisor,
            "aux_loss": aux.aux_loss / n,
            "sequence_loss": aux.sequence_loss / n,
            "z_loss": aux.z_loss / n,
            "mtp_loss": aux.mtp_cross_entropy / divisor,
            "num_tokens": router.num_tokens,
            "expert_load": router.expert_load,
            "router_entropy": router.entropy_sum / aux.routed_tokens.clip(1),
            "num_dropped": router.num_dropped.sum(),
            "num_rounds": router.num_rounds / n,
            "num_shadows": router.num_shadows / n,
        }

    def move_biases(self, expert_bias: nnx.State, aux: LossParts) -> nnx.State:
        """Updates each expert's bias from the whole batch's load."""
        return move_expert_bias(expert_bias, aux.router.expert_load, self.expert_bias_update_rate)


@dataclass(frozen=True)
class UserLoss(Objective):
    """Wraps a user's loss(model, batch). Value and metrics are means over micro-batches; expert biases are not updated."""

    function: LossFunction

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Adds "num_labels" and "label_weight" to a batch with a "loss_mask": the whole batch's sums / micro-batches."""
        if "loss_mask" not in batch:
            return batch
        # With them, a mean over the micro-batches is a mean over all labels, however these are split.
        num_labels = total_weight((batch["loss_mask"] != 0).astype(jnp.int32))
        whole = {"num_labels": num_labels, "label_weight": label_weight}
        return {name: as_divisor(of_batch) / self.micro_batches for name, of_batch in whole.items()} | batch

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], dict[str, Array]]:
        """Returns the function's scalars divided by the number of micro-batches.

        Raises:
          ValueError: the model has multi-token prediction modules, or the function returned another type.
        """
        refuse_further_predictors(model.config)
        found = self.function(model, batch)
        _check_result(found)
        return jax.tree.map(lambda scalar: jnp.asarray(scalar, jnp.float32) / self.micro_batches, found)

    def metrics(self, value: Float[Array, ""], aux: dict[str, Array], label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Returns the value as metric "loss", along with the function's own metrics."""
        return {"loss": value} | aux


def as_objective(loss: Objective | LossFunction, micro_batches: int) -> Objective:
    """Wraps a plain loss function in a `UserLoss`; returns an `Objective` unchanged.

    Raises:
      TypeError: a function that cannot be called as loss(model, batch).
    """
    if isinstance(loss, Objective):
        return replace(loss, micro_batches=micro_batches)
    check_loss_function(loss)
    return UserLoss(loss, micro_batches=micro_batches)


def can_overlap(objective: Objective) -> bool:
    """Returns True if the objective has an `of_states` that matches its `__call__`.

    A subclass that overrides only `__call__` cannot: its inherited `of_states` computes something else.
    """
    classes = type(objective).__mro__
    of_states, call = (
        next(place for place, kind in enumerate(classes) if name in vars(kind)) for name in ("of_states", "__call__")
    )
    return of_states <= call and classes[of_states] is not Objective


def check_objective(objective: Objective, user: str) -> None:
    """Checks that the objective can be computed from hidden states. `user` names the caller in the message.

    Raises:
      TypeError: it has no matching `of_states`.
    """
    if not can_overlap(objective):
        raise TypeError(
            f"an objective of {user} must define of_states in addition to __call__, as train.NextToken does; a function "
            "loss(model, batch) runs the layers itself: leave overlap_micro_batches and the mesh axis pipe out"
        )


def check_loss_function(function: LossFunction) -> None:
    """Checks that a function can be called as loss(model, batch), and is not in the older form with `mesh_axes`.

    Raises:
      TypeError: the function has other parameters.
    """
    signature = inspect.signature(function)
    try:
        signature.bind("model", "batch")
        fits = "mesh_axes" not in signature.parameters
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(
            "loss must be a function loss(model, batch) -> (a scalar, a dict of scalars); "
            f"{name_of(function)} takes {signature}. mesh_axes and options are not passed on any more: model.execution holds "
            "them. Write train.log_probs(model, batch), and train.sum_over_devices(model, x) for jax.lax.psum(x, mesh_axes)"
        )


def check_mtp_loss_coef(config: ModelConfig, mtp_loss_coef: float) -> None:
    """Checks that MTP modules, if the model has any, are trained: their loss coefficient is not 0.

    Raises:
      ValueError: the model has such modules and the coefficient of their loss is 0. Weight decay would shrink them, and the
        load of modules that are not run is not known, by which biases move.
    """
    if config.mtp_stages and not mtp_loss_coef:
        raise ValueError(
            "mtp_loss_coef=0 would leave the model's MTP modules untrained while the model changes; "
            "give them a factor, or load the model without them: from_pretrained(..., mtp=False)"
        )


def refuse_further_predictors(config: ModelConfig) -> None:
    """Raises if the model has MTP modules, which a user's loss would not train.

    Raises:
      ValueError: the model has such modules.
    """
    if config.mtp_stages:
        raise ValueError(
            "the model has MTP modules, which `loss` does not train; load it without them: "
            "from_pretrained(..., mtp=False), or mtp_loss_coef=0 in finetune's settings"
        )


def name_of(function: LossFunction) -> str:
    """Returns the loss function's name. Checkpoints record it, so that a run is not resumed with another loss."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def _check_result(found: Any) -> None:
    """Refuses anything but (scalar, {name: scalar}) with the same values on all devices."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ValueError(f"loss must return (a scalar, a dict of scalars); got {type(found).__name__}")
    if taken := sorted(found[1].keys() & set(TAKEN_NAMES)):
        raise ValueError(f"loss returned the metric(s) {', '.join(taken)}, which a step has already; use other names")
    for name, value in {"its value": found[0], **found[1]}.items():
        if not isinstance(value, jax.Array | np.ndarray | np.number | float | int):
            raise ValueError(f"loss must return scalars; {name} is a {type(value).__name__}")
        if jnp.shape(value):
            raise ValueError(f"loss must return scalars; {name} has shape {list(jnp.shape(value))}")
        if axes := varying_axes(value):
            raise ValueError(
                f"loss must return the same on every device, and {name} differs along {', '.join(sorted(axes))}: sum it over "
                "them with train.sum_over_devices(model, ...)"
            )


def move_expert_bias(expert_bias: nnx.State, expert_load: Int[Array, "moe_layers experts"], rate: float) -> nnx.State:
    """Updates the expert biases of each stack, [layers, experts], from its layers' load (`layers.balance.move_bias`).

    `expert_load` is in the order of the layers. Without biases, or with rate 0, returns `expert_bias` itself.

    Raises:
      ValueError: the biases have more or fewer layers than the load.
    """
    biases = {stack_of(parameter_path(path)): bias for path, bias in jax.tree.leaves_with_path(expert_bias)}
    if not biases or rate == 0:
        return expert_bias
    if (found := sum(map(len, biases.values()))) != len(expert_load):
        raise ValueError(f"the model has biases for {found} of its {len(expert_load)} layers with experts; all need one")
    places = layers_of_stacks({stack: len(bias) for stack, bias in biases.items()})
    moved = [move_bias(bias, expert_load[places[stack]], rate) for stack, bias in biases.items()]
    return jax.tree.unflatten(jax.tree.structure(expert_bias), moved)


def expert_bias_range(expert_bias: nnx.State) -> dict[str, Float[Array, "moe_layers 2"]]:
    """Returns the metric "expert_bias_range", each layer's (smallest, largest) bias; no metric for a model without biases."""
    stacks = {stack_of(parameter_path(path)): bias for path, bias in jax.tree.leaves_with_path(expert_bias)}
    if not stacks:
        return {}
    biases, places = jnp.concatenate(list(stacks.values())), layers_of_stacks({n: len(bias) for n, bias in stacks.items()})
    if any(place.step > 1 for place in places.values()):
        biases = biases[np.argsort(np.concatenate([np.arange(len(biases))[places[stack]] for stack in stacks]))]
    return {"expert_bias_range": jnp.stack([biases.min(axis=1), biases.max(axis=1)], axis=1)}
