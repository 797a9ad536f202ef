"""Reinforcement learning: trains a model by rewards of the answers that it draws (GRPO and related algorithms)."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.reinforcement.policy import Policy
    from moe_jax.reinforcement.samples import Group, Sample

__all__ = ["Group", "Policy", "Sample"]

export_lazily(__name__)
