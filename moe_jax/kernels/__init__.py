"""The models' building blocks as functions on arrays, without Flax, meshes or configs."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.kernels.attention.api import attention
    from moe_jax.kernels.experts.activation import SILU, Activation
    from moe_jax.kernels.experts.api import down, experts_mlp, gate_up
    from moe_jax.kernels.experts.fp8.dense import fp8_matmul
    from moe_jax.kernels.experts.fp8.precision import Precision
    from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, quantise_matrices
    from moe_jax.kernels.experts.ragged_dot import ragged_dot, ragged_dot_for_tokamax
    from moe_jax.kernels.experts.routing import Plan, plan
    from moe_jax.kernels.vocabulary import TokenScores, cross_entropy, token_log_probs, token_log_probs_and_entropies

__all__ = [
    "SILU", "Activation", "Plan", "Precision", "QuantisedMatrices", "TokenScores", "attention", "cross_entropy", "down",
    "experts_mlp", "fp8_matmul", "gate_up", "plan", "quantise_matrices", "ragged_dot", "ragged_dot_for_tokamax",
    "token_log_probs", "token_log_probs_and_entropies",
]  # fmt: skip

export_lazily(__name__)
