"""Steps without passes, for tests of what surrounds them in a run, and steps that several runs share."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.train.compiled_step import TrainStep
from tests.helpers import shared_steps

NUMBERS = "loss total_loss aux_loss sequence_loss z_loss grad_norm learning_rate num_tokens num_dropped".split()


@pytest.fixture
def steps_that_learn_nothing(monkeypatch):
    """For models without experts: a step leaves the state as it is, and nothing is compiled."""
    put_in_place_of_steps(monkeypatch, lambda state, batch: (state, numbers_of(1)))


@pytest.fixture
def steps_that_add(monkeypatch):
    """For models without experts: a step adds a number that follows from its batch to all parameters.

    The loss follows from batch and parameters, so that another place in the data or other weights are seen at once.
    """

    def step(state, batch):
        seen = jnp.float32((batch["tokens"] * jnp.arange(1, batch["tokens"].shape[1] + 1)).sum() / 1e6)
        params = jax.tree.map(lambda a: a + seen, state.params)
        return replace(state, step=state.step + 1, params=params), numbers_of(seen + jax.tree.leaves(params)[0].sum())

    put_in_place_of_steps(monkeypatch, step)


@pytest.fixture(scope="module")
def one_step_for_all():
    """Runs of a module that compute the same share a compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        shared_steps.share(patch)
        yield


def put_in_place_of_steps(monkeypatch, step):
    module = sys.modules["moe_jax.recipes.run.model"]
    monkeypatch.setattr(module, "make_train_step", lambda *_, remat, **__: TrainStep(lambda _: None, remat, None, None))
    monkeypatch.setattr(TrainStep, "prepare", lambda *_: "")
    monkeypatch.setattr(TrainStep, "__call__", lambda _, state, batch: step(state, batch))


def numbers_of(loss):
    """Returns metrics of a step of a model without experts."""
    return dict.fromkeys(NUMBERS, np.float32(loss)) | {"expert_load": np.zeros((0, 0))}
