"""Text generation: sampling, decoding with a KV cache, and speculative decoding with the model's own drafts."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.generation.devices import generation_mesh
    from moe_jax.generation.generate import generate
    from moe_jax.generation.speculative import Drafts, generate_with_drafts
    from moe_jax.generation.text import chat, complete

__all__ = ["Drafts", "chat", "complete", "generate", "generate_with_drafts", "generation_mesh"]

export_lazily(__name__)
