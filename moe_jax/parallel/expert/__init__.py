"""Expert parallelism: each device of a mesh axis holds a part of the experts, and tokens travel to theirs.

docs/parallel_experts.md compares the transports.
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.parallel.expert.exchange import combine, dispatch
    from moe_jax.parallel.expert.mlp import Exchange, expert_parallel_mlp
    from moe_jax.parallel.expert.settings import TRANSPORTS, ExpertParallel

__all__ = ["TRANSPORTS", "Exchange", "ExpertParallel", "combine", "dispatch", "expert_parallel_mlp"]

export_lazily(__name__)
