"""`moe-jax check`: runs one forward and one backward pass of a model, and reports results, times and memory."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.check.report import CheckReport, check_checkpoint, check_model, check_random, format_report

__all__ = ["CheckReport", "check_checkpoint", "check_model", "check_random", "format_report"]

export_lazily(__name__)
