"""A model's matrices in FP8: frozen ones as they lie in memory, and copies of trained ones.

Copies are made once for several calls, outside a loop over micro-batches. No checkpoint and no optimizer has them.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from moe_jax.kernels.experts.fp8.dense import NO_COPIES, DenseCopies
from moe_jax.kernels.experts.fp8.dense import fp8_matmul as fp8_matmul
from moe_jax.kernels.experts.fp8.experts import Fp8Matrices
from moe_jax.kernels.experts.fp8.passes import QuantisedExperts
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fp8.rounded import weights_and_copies
from moe_jax.kernels.experts.fused_vjp import Matrices
from moe_jax.layers.linear import Fp8Copies
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled


def frozen_matrices(gate_up: nnx.Variable, down: nnx.Variable, layer: Int[Array, ""] | None) -> Fp8Matrices:
    """Returns matrices that get no gradients; those in blocks of 128 x 128 are multiplied as they are.

    Args:
      layer: the layer of the stacks to use; None: they are no stacks.
    """
    values = gate_up.get_value(), down.get_value()
    if all(isinstance(value, BlockScaled) and value.block == FP8_BLOCK for value in values):
        quantised = (QuantisedMatrices(value.codes, value.scales.astype(jnp.float32)) for value in values)
        return Fp8Matrices(None, QuantisedExperts(*quantised), frozen=True, layer=layer)
    return Fp8Matrices(Matrices(gate_up[...], down[...]), frozen=True, layer=layer)


def trained_matrices(gate_up: nnx.Variable, down: nnx.Variable, copies: Fp8Copies | None) -> Fp8Matrices:
    """Returns matrices that get gradients, with their copies in FP8 if there are some, or as they were gathered in FP8."""
    weights, made = weights_and_copies(gate_up[...], down[...])
    given: Any = made if copies is None else copies.get_value()
    return Fp8Matrices(weights, given)


def copies_of_matrix(weight: nnx.Variable, copies: Fp8Copies | None) -> DenseCopies:
    """Returns a dense matrix in FP8: its copies, or its codes if it lies in blocks of 128 x 128; empty without either."""
    value = weight.get_value()
    if isinstance(value, BlockScaled) and value.block == FP8_BLOCK:
        return DenseCopies(QuantisedMatrices(value.codes, value.scales.astype(jnp.float32)))
    return NO_COPIES if copies is None else copies.get_value()
