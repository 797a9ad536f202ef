"""Device meshes, the layout of parameters on them, experts over devices, and sequences over devices."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.parallel.choices import MESH_AXES, MeshShape
    from moe_jax.parallel.collectives.hops import default_hops
    from moe_jax.parallel.expert import ExpertParallel, expert_parallel_mlp
    from moe_jax.parallel.fsdp import ShardedParameters
    from moe_jax.parallel.layout import parameter_sharding
    from moe_jax.parallel.mesh import make_mesh
    from moe_jax.parallel.parallelism import Parallelism
    from moe_jax.parallel.sequence.attention import ContextParallel, context_attention, own_tokens, starts_of_segments
    from moe_jax.parallel.sequence.layouts import shard_sequence, token_indices, unshard_sequence
    from moe_jax.parallel.spread import Spread
    from moe_jax.runtime.processes import initialize_processes

__all__ = [
    "MESH_AXES", "ContextParallel", "ExpertParallel", "MeshShape", "Parallelism", "ShardedParameters", "Spread",
    "context_attention", "default_hops", "expert_parallel_mlp", "initialize_processes", "make_mesh", "own_tokens",
    "parameter_sharding", "shard_sequence", "starts_of_segments", "token_indices", "unshard_sequence",
]  # fmt: skip

export_lazily(__name__)
