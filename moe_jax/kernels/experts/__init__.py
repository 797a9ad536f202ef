"""The experts' matmuls: the public op, its gradients, and one module or folder per backend."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.kernels.backends import BACKENDS, resolve_backend
    from moe_jax.kernels.experts.api import down, experts_mlp, gate_up
    from moe_jax.kernels.experts.routing import Plan, plan

__all__ = ["BACKENDS", "Plan", "down", "experts_mlp", "gate_up", "plan", "resolve_backend"]

export_lazily(__name__)
