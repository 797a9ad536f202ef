"""Attention: the public op, partial attention for rings, and flash attention for Hopper GPUs."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.kernels.attention.api import attention

__all__ = ["attention"]

export_lazily(__name__)
