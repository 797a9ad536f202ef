"""Preference losses on meshes: loss, metrics, reference and parameters of two steps equal one device's."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.parallel import Parallelism
from moe_jax.preferences import Preference, PreferenceSettings
from tests.helpers.examples import make_answers, make_pairs, packed_batch
from tests.helpers.meshes import mesh_of
from tests.helpers.train_steps import train


def batch_of(settings, rows=8, seq_len=32):
    """Rows with different numbers of examples, and log-probabilities of a reference."""
    examples = make_pairs(13) if settings.of_pairs else make_answers([1, 0, 0, 1, 1] * 5)
    batch = {name: np.asarray(array) for name, array in packed_batch(examples, rows, seq_len, max_examples=4).items()}
    reference = -np.abs(np.random.default_rng(0).normal(size=(*batch["example"].shape, 2))) * 9
    return batch | {"reference_log_probs": reference.astype(np.float32)}


def two_steps(settings, batch, parallelism=None):
    """Steps of SGD: AdamW divides a gradient by its own size, so that the noise of f32 would move weights by whole steps."""
    return train(batch, parallelism, loss=Preference(settings), optimizer=optax.sgd(0.1), gradient_accumulation=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loss, sizes",
    [("dpo", dict(fsdp=2, expert=2)), ("kto", dict(data=2, context=2)), ("orpo", dict(expert=2, context=2))],
    ids=str,
)
def test_steps_are_those_of_one_device(loss, sizes):
    settings = PreferenceSettings(loss, beta=0.3, aux_loss_coef=0.1)
    batch = batch_of(settings)
    (expected, of_one), (state, metrics) = (
        two_steps(settings, batch, parallelism) for parallelism in (None, Parallelism(mesh_of(**sizes)))
    )
    for found, wanted in zip(metrics, of_one, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for x, y in zip(jax.tree.leaves(nnx.state(state.params)), jax.tree.leaves(expected.params), strict=True):
        assert np.linalg.norm(np.asarray(x) - y) <= 1e-5 * np.linalg.norm(y)
