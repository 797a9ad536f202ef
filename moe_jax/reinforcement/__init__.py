"""Reinforcement learning: trains a model by rewards of the answers that it draws (GRPO and related algorithms)."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.reinforcement.advantages import advantages, has_failed, has_spread, kept_groups, token_weights, total_rewards
    from moe_jax.reinforcement.objective import PolicyLoss, sampled_token_scores
    from moe_jax.reinforcement.policy import Policy
    from moe_jax.reinforcement.rows import policy_rows
    from moe_jax.reinforcement.samples import Group, Sample
    from moe_jax.reinforcement.settings import PolicySettings

__all__ = [
    "Group", "Policy", "PolicyLoss", "PolicySettings", "Sample", "advantages", "has_failed", "has_spread", "kept_groups",
    "policy_rows", "sampled_token_scores", "token_weights", "total_rewards",
]  # fmt: skip

export_lazily(__name__)
