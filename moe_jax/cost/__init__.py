"""A model of cost: how long a training step takes on a mesh, and how much memory it needs, before any GPU is asked for."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.cost.run import Run
    from moe_jax.cost.step import Prediction, predict

__all__ = ["Prediction", "Run", "predict"]

export_lazily(__name__)
