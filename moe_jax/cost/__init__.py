"""Cost model: predicts the time and memory of a training step on a mesh, without any GPU."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.cost.planned_step import PlannedStep
    from moe_jax.cost.step import Prediction, predict

__all__ = ["PlannedStep", "Prediction", "predict"]

export_lazily(__name__)
