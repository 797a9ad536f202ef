"""Expert parallelism: each device of a mesh axis holds a part of the experts, and tokens travel to the experts they chose.

docs/parallel_experts.md compares the transports.
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.layers.spread import Exchange
    from moe_jax.parallel.expert.exchange import combine, dispatch
    from moe_jax.parallel.expert.mlp import expert_parallel_mlp, experts_of_devices
    from moe_jax.parallel.expert.settings import TRANSPORTS, ExpertParallel, Transport

__all__ = [
    "TRANSPORTS",
    "Exchange",
    "ExpertParallel",
    "Transport",
    "combine",
    "dispatch",
    "expert_parallel_mlp",
    "experts_of_devices",
]

export_lazily(__name__)
