"""Models with random weights, for checks, benchmarks and tests at real size."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.config import ModelConfig
from moe_jax.layers.router import ExpertBias
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.parallel.mesh import refuse_pipe


def random_model(
    config: ModelConfig, dtype: DTypeLike, seed: int = 0, *, param_dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Decoder:
    """Draws random weights on their devices, one layer of one parameter at a time: no f32 copy of a large parameter exists.

    Args:
      param_dtype: dtype of the parameters (default: dtype).
      mesh: devices to spread the parameters over (`moe_jax.parallel.make_mesh`); None: the default device.

    Raises:
      ValueError: the mesh has several devices along `pipe`.
    """
    refuse_pipe(
        mesh, "random_model", "draw on a mesh without pipe, or on one device, and then take parallel.pipeline.chunks.to_chunks"
    )
    param_dtype = dtype if param_dtype is None else param_dtype

    def make():
        return from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    flat = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(abstract)):
        place = parameter_sharding(path, leaf.shape, mesh)
        if any("norm" in str(part) for part in path):
            value = jnp.ones(leaf.shape, param_dtype, device=place)
        elif isinstance(leaf, ExpertBias):
            value = jnp.zeros(leaf.shape, leaf.dtype, device=place)
        else:
            key = jax.random.fold_in(jax.random.key(seed), i)
            value = _normal(key, leaf.shape, config.initializer_range, param_dtype, place)
        flat.append((path, leaf.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _normal(key, shape, stddev, dtype: DTypeLike, place):
    def draw(key, shape):
        return jax.random.normal(key, shape, dtype) * jnp.asarray(stddev, dtype)

    if len(shape) < 3:
        return jax.jit(draw, static_argnums=1, out_shardings=place)(key, shape)
    draw_layers = jax.jit(lambda keys: jax.lax.map(lambda key: draw(key, shape[1:]), keys), out_shardings=place)
    return draw_layers(jax.random.split(key, shape[0]))
