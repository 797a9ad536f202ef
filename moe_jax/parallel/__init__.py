"""Device meshes, how the model's parameters lie on them, and how tokens travel between experts on different devices."""

from moe_jax.parallel.expert import ExpertParallel, expert_parallel_mlp
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.parallel.mesh import MESH_AXES, make_mesh

__all__ = ["MESH_AXES", "ExpertParallel", "expert_parallel_mlp", "make_mesh", "parameter_sharding"]
