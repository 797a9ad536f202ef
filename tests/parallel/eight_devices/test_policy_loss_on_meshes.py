"""Policy losses on meshes: loss, metrics and parameters of two steps equal one device's."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.parallel import Parallelism
from moe_jax.reinforcement import PolicyLoss, PolicySettings
from tests.helpers import seeds
from tests.helpers.meshes import mesh_of
from tests.helpers.policy_samples import make_groups, packed, random_like
from tests.helpers.train_steps import train

SETTINGS = {
    "tokens": PolicySettings(beta=0.1, importance="icepop", importance_low=0.7, balance_coef=0.1),
    "samples": PolicySettings(
        loss="gspo", beta=0.1, importance="tis", importance_level="sequence", off_policy_threshold=0.1, balance_coef=0.1
    ),
    "exact": PolicySettings(loss="grpo", exact=True),
}


def batch_of(settings):
    """Eight rows of 32 tokens or more, with experts to replay, and eight of padding."""
    rng = seeds.rng("policy on meshes")
    groups = make_groups(rng, 4, 4, tools=True, experts=(2, 2, 4))
    others = {name: random_like(rng, groups) for name in ("old_log_probs", "reference_log_probs")}
    batch = packed(groups, settings, seq_len=32, multiple_of=8, **others)
    for name in others:
        batch[name] = batch[name] + batch["sampled_log_probs"]
    batch = jax.tree.map(np.asarray, batch)
    rows = np.argsort(-np.abs(batch["loss_mask"]).sum(1), kind="stable")
    return {name: np.concatenate([array[rows], np.zeros_like(array)]) for name, array in batch.items()}


def two_steps(settings, batch, parallelism=None):
    return train(batch, parallelism, loss=PolicyLoss(settings), optimizer=optax.sgd(0.1), gradient_accumulation=2)


# In CI `test_policy_on_meshes` learns from sums over samples.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, sizes",
    [("tokens", dict(expert=2, context=2)), ("samples", dict(fsdp=2, expert=2)), ("exact", dict(data=2, fsdp=2))],
    ids=str,
)
def test_steps_are_those_of_one_device(name, sizes):
    """All rows of the last devices are padding."""
    batch = batch_of(SETTINGS[name])
    (expected, of_one), (state, metrics) = (
        two_steps(SETTINGS[name], batch, parallelism) for parallelism in (None, Parallelism(mesh_of(**sizes)))
    )
    for found, wanted in zip(metrics, of_one, strict=True):
        missing = {"clip_ratio/low_min", "clip_ratio/high_max"} if "context" in sizes else set()
        assert found.keys() == wanted.keys() - missing
        for metric, value in found.items():
            np.testing.assert_allclose(value, wanted[metric], rtol=1e-5, atol=1e-5, err_msg=metric)
    for x, y in zip(jax.tree.leaves(nnx.state(state.params)), jax.tree.leaves(expected.params), strict=True):
        assert np.linalg.norm(np.asarray(x) - y) <= 1e-5 * np.linalg.norm(y)


def test_sums_over_samples_need_whole_samples():
    with pytest.raises(ValueError, match="need sums over samples, which the mesh axis context splits"):
        two_steps(SETTINGS["samples"], batch_of(SETTINGS["samples"]), Parallelism(mesh_of(context=2)))
