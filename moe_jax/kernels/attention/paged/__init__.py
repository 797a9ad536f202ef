"""Attention to keys and values that lie in pages of 64 tokens, as a serving engine keeps them."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.kernels.attention.paged.api import paged_attention
    from moe_jax.kernels.attention.paged.page_size import PAGE_SIZE
    from moe_jax.kernels.attention.paged.queries import PagedQueries

__all__ = ["PAGE_SIZE", "PagedQueries", "paged_attention"]

export_lazily(__name__)
