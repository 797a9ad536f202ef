"""The identity of a run: compares the checkpoints in an output folder with the run that is asked for."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import lies_in_chunks, mesh_of, parameter_path
from moe_jax.runtime.processes import is_first_process

MODEL = "model"
"""The entry of a run's identity for its starting weights; runs begun before version 0.2 have no such entry."""

_logger = logging.getLogger(__name__)


def values_of(model: Decoder) -> list[float]:
    """Returns eight values of each parameter of a model in memory: enough to notice another model, not every changed weight.

    A model in a pipeline gives the values that it has without.
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


def same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> dict[str, Any]:
    """Returns the identity that the run in `output` continues with.

    Starting weights are compared if the run noted them in the same way. That is a hash of a checkpoint's weights, or values of
    a model passed from Python. Otherwise the run continues with what it noted, if anything, and a warning.

    Raises:
      ValueError: the folder holds another run; the message names what differs.
    """
    kept = {name: value for name, value in current.items() if name != MODEL}
    # Through JSON, as it was saved: tuples are lists there.
    different = [
        f"{name}: checkpoint {saved.get(name)!r}, now {value!r}" for name, value in kept.items() if saved.get(name) != value
    ]
    noted, asked = saved.get(MODEL), current[MODEL]
    if type(noted) is not type(asked):
        if is_first_process():
            how = "did not note its starting weights" if noted is None else "noted its starting weights in another way"
            _logger.warning("the run in %s %s, so nothing tells whether `model` is the one that it began with", output, how)
    elif not _same_weights(noted, asked):
        different.append("model: its weights are not those that the run began with")
    if different:
        raise ValueError(f"{output} holds another run; choose another output folder. Different: " + "; ".join(different))
    return kept if noted is None else kept | {MODEL: noted}


def _same_weights(noted: Any, asked: Any) -> bool:
    if isinstance(noted, str):
        return noted == asked
    # A random initialisation rounds differently on other devices; bf16 has 2**-8 of a number.
    return len(noted) == len(asked) and np.allclose(noted, asked, rtol=2**-7, atol=0, equal_nan=True)
