"""Reinforcement learning: trains a model by rewards of the answers that it draws (GRPO and related algorithms)."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.reinforcement.environments import play
    from moe_jax.reinforcement.journal import Journal
    from moe_jax.reinforcement.policy import Policy
    from moe_jax.reinforcement.prompts import Prompts, open_prompts, prompt_at, prompts_within
    from moe_jax.reinforcement.rewards import Reward, Scorer, from_verl, load_reward, score
    from moe_jax.reinforcement.samples import Group, Sample

__all__ = [
    "Group", "Journal", "Policy", "Prompts", "Reward", "Sample", "Scorer", "from_verl", "load_reward", "open_prompts", "play",
    "prompt_at", "prompts_within", "score",
]  # fmt: skip

export_lazily(__name__)
