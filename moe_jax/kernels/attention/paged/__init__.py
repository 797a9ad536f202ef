"""Attention to keys and values in pages of 64 tokens, as in a serving engine."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.kernels.attention.paged.api import paged_attention
    from moe_jax.kernels.attention.paged.blocks import PagedQueries

PAGE_SIZE = 64
"""Tokens of a page. Defined here without JAX, since the schedule of an engine plans pages too."""

__all__ = ["PAGE_SIZE", "PagedQueries", "paged_attention"]

export_lazily(__name__)
