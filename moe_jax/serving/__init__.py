"""Serving: many prompts at once, their keys and values in pages, as requests come and go."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.serving.engine import Engine
    from moe_jax.serving.handle import Event, Handle
    from moe_jax.serving.loop import QueueFull, Stats
    from moe_jax.serving.request import Completion, EngineLimits, SamplingOptions
    from moe_jax.serving.strict_log_probs import strict_log_probs

__all__ = [
    "Completion", "Engine", "EngineLimits", "Event", "Handle", "QueueFull", "SamplingOptions", "Stats", "strict_log_probs",
]  # fmt: skip

export_lazily(__name__)
