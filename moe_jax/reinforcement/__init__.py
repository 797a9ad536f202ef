"""Reinforcement learning: trains a model by rewards of the answers that it draws (GRPO and related algorithms)."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.reinforcement.advantages import advantages, has_failed, has_spread, kept_groups, token_weights, total_rewards
    from moe_jax.reinforcement.environments import play
    from moe_jax.reinforcement.journal import Journal
    from moe_jax.reinforcement.objective import PolicyLoss, sampled_token_scores
    from moe_jax.reinforcement.policy import Policy
    from moe_jax.reinforcement.prompts import Prompts, open_prompts, prompt_at, prompts_within
    from moe_jax.reinforcement.reward_calls import from_verl
    from moe_jax.reinforcement.rewards import Reward, Scorer, load_reward, score
    from moe_jax.reinforcement.rows import policy_rows
    from moe_jax.reinforcement.samples import Group, Sample
    from moe_jax.reinforcement.settings import LossSettings, PolicySettings

__all__ = [
    "Group", "Journal", "LossSettings", "Policy", "PolicyLoss", "PolicySettings", "Prompts", "Reward", "Sample", "Scorer",
    "advantages", "from_verl", "has_failed", "has_spread", "kept_groups", "load_reward", "open_prompts", "play",
    "policy_rows", "prompt_at", "prompts_within", "sampled_token_scores", "score", "token_weights", "total_rewards",
]  # fmt: skip

export_lazily(__name__)
