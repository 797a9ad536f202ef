"""Complete runs, each started with one call or one command: fine-tuning, training on preferences, and by rewards."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.recipes.dry_run import dry_run
    from moe_jax.recipes.finetuning.learning_rate import LearningRates, find_learning_rate
    from moe_jax.recipes.finetuning.loop import FinetuneResult, finetune
    from moe_jax.recipes.finetuning.settings import FinetuneSettings
    from moe_jax.recipes.grpo.loop import grpo
    from moe_jax.recipes.grpo.settings import GrpoSettings
    from moe_jax.recipes.preferring.loop import PreferResult, prefer
    from moe_jax.recipes.preferring.settings import PreferSettings
    from moe_jax.recipes.run.report import write_report

__all__ = [
    "FinetuneResult", "FinetuneSettings", "GrpoSettings", "LearningRates", "PreferResult", "PreferSettings", "dry_run",
    "find_learning_rate", "finetune", "grpo", "prefer", "write_report",
]  # fmt: skip

export_lazily(__name__)
