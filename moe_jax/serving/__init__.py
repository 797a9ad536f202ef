"""Serving: continuous batching of many requests, with keys and values in pages."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.serving.engine import Engine
    from moe_jax.serving.grammar import choice_grammar, json_grammar, regex_grammar
    from moe_jax.serving.handle import Event, Handle, as_completed
    from moe_jax.serving.loop import QueueFull, Stats
    from moe_jax.serving.request import Completion, EngineLimits, SamplingOptions
    from moe_jax.serving.strict_log_probs import strict_log_probs

__all__ = [
    "Completion", "Engine", "EngineLimits", "Event", "Handle", "QueueFull", "SamplingOptions", "Stats", "as_completed",
    "choice_grammar", "json_grammar", "regex_grammar", "strict_log_probs",
]  # fmt: skip

export_lazily(__name__)
