"""Steps of training that compute no passes, for tests of what surrounds steps in a run of a model without experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.recipes.run import model as model_of_runs
from moe_jax.train.compiled_step import TrainStep

NUMBERS = "loss total_loss aux_loss sequence_loss z_loss grad_norm learning_rate num_tokens num_dropped".split()


def put_in_place(monkeypatch, step) -> None:
    """Makes runs call step(state, batch), which is not compiled."""
    monkeypatch.setattr(model_of_runs, "make_train_step", lambda *_, remat, **__: TrainStep(lambda _: None, remat, None, None))
    monkeypatch.setattr(TrainStep, "prepare", lambda *_: "")
    monkeypatch.setattr(TrainStep, "__call__", lambda _, state, batch: step(state, batch))


def learn_nothing(state, batch):
    """Leaves the state as it is."""
    return state, numbers_of(1)


def add(state, batch):
    """Adds a number that follows from the batch to all parameters.

    The loss follows from batch and parameters, so that another place in the data or other weights are seen at once.
    """
    seen = jnp.float32((batch["tokens"] * jnp.arange(1, batch["tokens"].shape[1] + 1)).sum() / 1e6)
    params = jax.tree.map(lambda a: a + seen, state.params)
    return replace(state, step=state.step + 1, params=params), numbers_of(seen + jax.tree.leaves(params)[0].sum())


def numbers_of(loss):
    """Returns metrics of a step of a model without experts."""
    return dict.fromkeys(NUMBERS, np.float32(loss)) | {"expert_load": np.zeros((0, 0))}
