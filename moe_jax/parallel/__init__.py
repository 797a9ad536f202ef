"""Device meshes and how the model's parameters lie on them."""

from moe_jax.parallel.layout import parameter_sharding
from moe_jax.parallel.mesh import MESH_AXES, make_mesh

__all__ = ["MESH_AXES", "make_mesh", "parameter_sharding"]
