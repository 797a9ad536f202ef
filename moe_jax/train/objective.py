"""What a training step minimises: `train.loss`, or a function of the user's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.kernels.varying import varying_axes
from moe_jax.layers.stack import Remat
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.spread import Spread
from moe_jax.train.loss import Batch, LossParts, loss

OwnLoss = Callable[..., tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
"""A user's loss, as `make_train_step` describes it."""

TAKEN_NAMES = (
    *("step", "total_loss", "grad_norm", "learning_rate", "num_labels", "num_tokens", "tokens_per_second", "model_tflops"),
    *("eval_loss", "expert_load", "expert_bias_range"),
)
"""Metrics that every step has; those of a user's loss have other names."""


class Objective(NamedTuple):
    """`of_batch(model, batch, num_labels, **mesh options)` -> (total, parts) of a micro-batch, to be summed over all.

    `metrics(total, parts, num_labels)` are what a step reports of the sums.
    """

    of_batch: Callable[..., tuple[Float[Array, ""], Any]]
    metrics: Callable[[Float[Array, ""], Any, Float[Array, ""]], dict[str, Array]]


def next_tokens(micro_batches: int, **options: Any) -> Objective:
    """`train.loss` with these options: cross-entropy over the labels of the whole batch, router losses as means."""

    def of_batch(model: Decoder, batch: Batch, num_labels: Float[Array, ""], **of_mesh: Any):
        return loss(model, batch, num_labels=num_labels, router_share=1 / micro_batches, **options, **of_mesh)

    def metrics(total: Float[Array, ""], parts: LossParts, num_labels: Float[Array, ""]) -> dict[str, Array]:
        return {
            "loss": parts.cross_entropy / num_labels.clip(1),
            "aux_loss": parts.aux_loss / micro_batches,
            "sequence_loss": parts.sequence_loss / micro_batches,
            "z_loss": parts.z_loss / micro_batches,
            "mtp_loss": parts.mtp_cross_entropy / num_labels.clip(1),
            "num_tokens": parts.num_tokens,
            "expert_load": parts.expert_load,
            "router_entropy": parts.entropy_sum / parts.routed_tokens.clip(1),
            "num_dropped": parts.num_dropped,
            "num_rounds": parts.num_rounds / micro_batches,
            "num_shadows": parts.num_shadows / micro_batches,
        }

    return Objective(of_batch, metrics)


def own_loss(function: OwnLoss, micro_batches: int, *, remat: Remat, force_balanced_routing: bool) -> Objective:
    """The mean of a user's loss, and of its metrics, over the micro-batches."""
    options: dict[str, Any] = {"remat": remat} | ({"expert_ids": "balanced"} if force_balanced_routing else {})

    def of_batch(model: Decoder, batch: Batch, num_labels: Float[Array, ""], **of_mesh: Any):
        # With it, a mean over the micro-batches is one over all labels, whichever micro-batch they are in.
        share = {"num_labels": num_labels.clip(1) / micro_batches} if "loss_mask" in batch else {}
        spread: dict[str, Any] = {"mesh_axes": ()}
        if of_mesh:
            names = ("expert_parallel", "context_parallel", "layer_gathers", "mesh_axes")
            spread = {"mesh_axes": of_mesh["mesh_axes"], "spread": Spread(*(of_mesh[name] for name in names))}
        found = function(model, share | batch, **spread, **options)
        _check_result(found)
        return jax.tree.map(lambda scalar: jnp.asarray(scalar, jnp.float32) / micro_batches, found)

    def metrics(total: Float[Array, ""], parts: dict[str, Array], num_labels: Float[Array, ""]) -> dict[str, Array]:
        return {"loss": total} | parts

    return Objective(of_batch, metrics)


def refuse_coefficients(**coefficients: float | None) -> None:
    """Refuses factors of the built-in loss beside a user's, which alone says what is minimised.

    Raises:
      ValueError: one is given and not 0.
    """
    if given := {name: value for name, value in coefficients.items() if value}:
        named = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{named}: a factor of the built-in loss, which `loss` takes the place of; add that term there")


def refuse_further_predictors(config: ModelConfig) -> None:
    """Refuses a model with modules that predict further tokens, which a user's loss would leave behind.

    Raises:
      ValueError: the model has some.
    """
    if config.mtp_stages:
        raise ValueError(
            "the model has modules that predict further tokens, which `loss` does not train; load it without them: "
            "from_pretrained(..., mtp=False), or mtp_loss_coef=0 in finetune's settings"
        )


def name_of(function: OwnLoss) -> str:
    """The loss's name, which a run's checkpoints hold: another loss would be another run."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def _check_result(found: Any) -> None:
    """Refuses what is not (scalar, {name: scalar}), the same on all devices."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ValueError(f"loss must return (a scalar, a dict of scalars); got {type(found).__name__}")
    if taken := sorted(found[1].keys() & set(TAKEN_NAMES)):
        raise ValueError(f"loss returned the metric(s) {', '.join(taken)}, which a step has already; take other names")
    for name, value in {"its value": found[0], **found[1]}.items():
        if not isinstance(value, jax.Array | np.ndarray | np.number | float | int):
            raise ValueError(f"loss must return scalars; {name} is a {type(value).__name__}")
        if jnp.shape(value):
            raise ValueError(f"loss must return scalars; {name} has shape {list(jnp.shape(value))}")
        if axes := varying_axes(value):
            raise ValueError(
                f"loss must return the same on every device, and {name} differs along {', '.join(sorted(axes))}: sum it over "
                "them with jax.lax.psum(..., mesh_axes)"
            )
