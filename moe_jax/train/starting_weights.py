"""A few values of a run's starting weights, enough to recognise another model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import lies_in_chunks, mesh_of, parameter_path

MODEL = "model"
"""The entry of a run's identity for its starting weights; runs begun before version 0.2 have no such entry."""


def values_of(model: Decoder) -> list[float]:
    """Samples eight values of each parameter of a model in memory, to detect that another model is given.

    The values do not depend on a pipeline.
    """
    params = nnx.state(model, nnx.Param)
    mesh, num_layers = mesh_of(params), model.config.num_hidden_layers

    def middle(path: tuple, leaf: jax.Array) -> tuple[int, ...]:
        if not lies_in_chunks(parameter_path(path), leaf.shape):
            return tuple(size // 2 for size in leaf.shape[:-1])
        place = np.unravel_index(num_layers // 2, leaf.shape[:3])
        return (*map(int, place), *(size // 2 for size in leaf.shape[3:-1]))

    def sample(params: nnx.State) -> jax.Array:
        rows = [leaf[middle(path, leaf)][:8] for path, leaf in jax.tree.leaves_with_path(params)]
        return jnp.concatenate([row.astype(jnp.float32) for row in rows])

    # Replicated, so that each process of a job has all values.
    placed = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return np.asarray(jax.jit(sample, out_shardings=placed)(params)).tolist()


def same_weights(noted: Any, asked: Any) -> bool:
    """Compares two records of starting weights of one kind: checkpoint hashes, or sampled values."""
    if isinstance(noted, str):
        return noted == asked
    # A random initialisation rounds differently on other devices; bf16 has 2**-8 of a number.
    return len(noted) == len(asked) and np.allclose(noted, asked, rtol=2**-7, atol=0, equal_nan=True)
