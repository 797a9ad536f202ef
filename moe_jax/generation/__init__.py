"""Text out of a model: sampling, and decoding with a KV cache."""

from moe_jax.generation.generate import generate

__all__ = ["generate"]
