"""A batch of eight rows, and some steps of AdamW on it, on one device or on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers.segments import segment_positions
from moe_jax.parallel import parameter_sharding
from moe_jax.parallel.layout import parameter_path
from moe_jax.train import LossWeights, NextToken, init_state, make_optimizer, make_train_step, put_batch
from tests.helpers import tiny

ROWS, SEQ = 8, 16


def make_batch(rng):
    ids = np.sort(rng.integers(1, 4, (ROWS, SEQ)), axis=1)
    ids[:, -2:] = 0
    tokens, labels = rng.integers(0, 264, (2, ROWS, SEQ))
    mask = (ids != 0) & (rng.random(ids.shape) < 0.8)
    positions = segment_positions(jnp.asarray(ids))
    arrays = dict(tokens=tokens, labels=labels, loss_mask=mask, positions=positions, segment_ids=ids)
    return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


def weighted(batch):
    """The batch with a weight for each label."""
    return batch | {"loss_mask": (batch["loss_mask"] * np.linspace(0.1, 3, SEQ)).astype(np.float32)}


def train(batch, parallelism=None, steps=2, make_model=tiny.model, mtp_loss_coef=0.1, loss=None, optimizer=None, **options):
    """Returns the state after some steps of AdamW, and the metrics of each step."""
    graph, params, *biases = nnx.split(make_model(), nnx.Param, ...)
    if parallelism is not None:

        def place(path, p):
            return jax.device_put(p, parameter_sharding(parameter_path(path), p.shape, parallelism.mesh))

        params, *biases = jax.tree.map_with_path(place, (params, *biases))
    optimizer = make_optimizer(1e-2) if optimizer is None else optimizer
    state = init_state(nnx.merge(graph, params, *biases), optimizer, parallelism)
    if loss is None:
        loss = NextToken(LossWeights(aux_loss_coef=0.1, sequence_loss_coef=0.1, z_loss_coef=0.1, mtp_loss_coef=mtp_loss_coef))
    step = make_train_step(graph, optimizer, loss, parallelism=parallelism, **options)
    metrics = []
    for _ in range(steps):
        state, of_step = step(state, put_batch(batch, state.params, parallelism))
        metrics.append(of_step)
    return state, metrics
