"""Whole runs that a user starts with one call or one command: fine-tuning."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.recipes.finetuning.dry_run import dry_run
    from moe_jax.recipes.finetuning.loop import FinetuneResult, finetune
    from moe_jax.recipes.finetuning.report import write_report
    from moe_jax.recipes.finetuning.settings import FinetuneSettings

__all__ = ["FinetuneResult", "FinetuneSettings", "dry_run", "finetune", "write_report"]

export_lazily(__name__)
