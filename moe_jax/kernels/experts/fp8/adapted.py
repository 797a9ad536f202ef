"""`experts_mlp_adapted` beside matrices in FP8: these multiply in FP8, and the low-rank changes in bf16."""

import jax
from jaxtyping import Array, Float, Integer

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.adapted import AdaptedOperands, ExpertsAdapter, FrozenMatrices, adapted_experts
from moe_jax.kernels.experts.changed_matmuls import ChangedOptions
from moe_jax.kernels.experts.fp8.experts import Fp8Matrices, checked_sizes, refuse_gradient
from moe_jax.kernels.experts.fp8.passes import Fp8Options
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import quantise_matrices


def experts_mlp_adapted_in_fp8(
    x: Float[Array, "tokens hidden"],
    matrices: Fp8Matrices,
    topk_weights: Float[Array, "tokens k"],
    topk_experts: Integer[Array, "tokens k"],
    adapter: ExpertsAdapter,
    precision: Precision,
    *,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    activation: Activation = SILU,
) -> Float[Array, "tokens hidden"]:
    """Computes `experts_mlp_adapted`; the matrices' products are in FP8.

    Each product of a matrix and that of its change are rounded to bf16 and added. Operands are rounded to FP8 from bf16.
    Weights without copies in FP8 are rounded in each call.

    Raises:
        ValueError: what `experts_mlp_adapted` and `experts_mlp_in_fp8` raise; a stack of layers without copies in FP8.
    """
    if matrices.layer is not None and matrices.quantised is None:
        raise ValueError("a stack of layers beside adapters must be in FP8: each call would round all of its layers")
    sizes = checked_sizes(x, matrices, topk_weights, topk_experts)
    fp8 = Fp8Options.of(precision, backend, x.dtype, sizes["hidden"], sizes["inter"])
    operands = AdaptedOperands(x, _in_fp8(matrices), topk_weights, adapter, matrices.layer)
    options = ChangedOptions(fp8.sums, fp8, activation)
    return adapted_experts(operands, topk_experts, sizes, options, chunk_tokens)


def _in_fp8(matrices: Fp8Matrices) -> FrozenMatrices:
    if matrices.quantised is None:
        assert matrices.weights is not None
        return FrozenMatrices(*(quantise_matrices(jax.lax.stop_gradient(w)) for w in matrices.weights))
    stop = refuse_gradient if matrices.weights is None else jax.lax.stop_gradient
    return jax.tree.map(stop, FrozenMatrices(matrices.quantised.gate_up, matrices.quantised.down))
