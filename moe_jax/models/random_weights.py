"""Models with random weights, for checks, benchmarks and tests at real size."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array

from moe_jax.config import ModelConfig
from moe_jax.layers.linear import draw_normal
from moe_jax.layers.router import ExpertBias
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.parallel.pipeline.chunks import PipeShape, pipe_of, split_layers, stacked_shape


def random_model(
    config: ModelConfig,
    dtype: DTypeLike,
    seed: int = 0,
    *,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    pipe_chunks: int = 1,
) -> Decoder:
    """Builds a model with random weights, drawn layer by layer on their devices: no f32 copy of a large parameter exists.

    Args:
      param_dtype: dtype of the parameters (default: dtype).
      mesh: devices to spread the parameters over (`moe_jax.parallel.make_mesh`); None: the default device.
      pipe_chunks: as in `from_pretrained`. The weights do not depend on the pipe.

    Raises:
      ValueError: the layers cannot be split over the mesh's pipe.
    """
    pipe = pipe_of(mesh, pipe_chunks)
    layers = layers_in_pipe(config, pipe)
    param_dtype = dtype if param_dtype is None else param_dtype

    def make():
        return from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    flat = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(abstract)):
        shape = stacked_shape(path, leaf.shape, layers, pipe)
        place = parameter_sharding(path, shape, mesh)
        in_pipe = pipe if shape != leaf.shape else PipeShape()
        if any("norm" in str(part) for part in path):
            value = _ones(leaf.shape, param_dtype, place, in_pipe)
        elif isinstance(leaf, ExpertBias):
            value = jnp.zeros(leaf.shape, leaf.dtype, device=place)
        else:
            key = jax.random.fold_in(jax.random.key(seed), i)
            value = _normal(key, leaf.shape, config.initializer_range, param_dtype, place, in_pipe)
        flat.append((path, leaf.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _ones(shape: tuple[int, ...], dtype: DTypeLike, place: Sharding, pipe: PipeShape) -> Array:
    if pipe.ranks == 1:
        return jnp.ones(shape, dtype, device=place)
    return jax.jit(lambda: split_layers(jnp.ones(shape, dtype), *pipe), out_shardings=place)()


def _normal(key, shape, stddev, dtype: DTypeLike, place: Sharding, pipe: PipeShape) -> Array:
    """Draws [layers, ...] layer by layer, or [...]; padding slots of a pipeline are zeros."""

    def draw(key, shape):
        return draw_normal(key, shape, stddev, dtype)

    if len(shape) < 3:
        return jax.jit(draw, static_argnums=1, out_shardings=place)(key, shape)
    keys = jax.random.split(key, shape[0])
    if pipe.ranks == 1:
        return jax.jit(lambda keys: jax.lax.map(lambda key: draw(key, shape[1:]), keys), out_shardings=place)(keys)
    assert isinstance(place, NamedSharding)
    of_ranks = NamedSharding(place.mesh, PartitionSpec("pipe", *place.spec[3:]))

    def draw_of_ranks(keys, numbers):
        """Draws the weights of the layers with these numbers, each on its own rank; number 0 is padding."""
        drawn = jax.vmap(lambda number: jnp.where(number > 0, draw(keys[number - 1], shape[1:]), 0))(numbers)
        return jax.lax.with_sharding_constraint(drawn, of_ranks)

    def draw_chunks(keys):
        numbers = jnp.moveaxis(split_layers(jnp.arange(1, shape[0] + 1), *pipe), 1, 2)
        drawn = jax.lax.map(partial(draw_of_ranks, keys), numbers.reshape(-1, pipe.ranks))
        return jnp.moveaxis(drawn.reshape(*numbers.shape, *shape[1:]), 2, 1)

    return jax.jit(draw_chunks, out_shardings=place)(keys)
