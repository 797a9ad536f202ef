"""A model's matrices in FP8: frozen ones as they are stored, and copies of trained ones.

Copies are made once for several calls, outside a loop over micro-batches. Checkpoints and optimizers do not have them.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from moe_jax.kernels.experts.fp8.dense import NO_COPIES, DenseCopies
from moe_jax.kernels.experts.fp8.dense import fp8_matmul as fp8_matmul
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.layers.linear import Fp8Copies
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled


def codes_of(value: Any) -> QuantisedMatrices | None:
    """Returns a matrix that is stored in FP8 (one scale per 128 x 128 block) as an FP8 operand; None for any other."""
    if not isinstance(value, BlockScaled) or value.block != FP8_BLOCK:
        return None
    return QuantisedMatrices(value.codes, value.scales.astype(jnp.float32))


def copies_of_matrix(weight: nnx.Variable, copies: Fp8Copies | None) -> DenseCopies:
    """Returns the FP8 form of a dense matrix: its copies, or the stored codes of a frozen one; empty if it has neither."""
    codes = codes_of(weight.get_value())
    if codes is not None:
        return DenseCopies(codes)
    return NO_COPIES if copies is None else copies.get_value()
