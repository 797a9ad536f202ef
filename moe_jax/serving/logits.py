"""Logits of hidden states, strict or as XLA computes them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def logits_of(
    hidden: Float[Array, "rows hidden"], head: Float[Array, "vocab hidden"], *, strict: bool
) -> Float[Array, "rows vocab"]:
    """Returns f32 logits; with `strict` a row's bits do not depend on the number of rows."""
    head = head.astype(hidden.dtype)
    if strict:
        # Imports Pallas Mosaic GPU, a second of CPU time that other engines save.
        from moe_jax.kernels.strict.matmul import matmul

        return matmul(hidden, head)
    return jnp.einsum("rd,vd->rv", hidden, head, preferred_element_type=jnp.float32)
