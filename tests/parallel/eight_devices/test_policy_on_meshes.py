"""A policy that learns on a mesh draws the answers of one device, and takes the same steps."""

from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax import adapters
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving import EngineLimits
from tests.helpers import tiny
from tests.helpers.meshes import laid_out

SETTINGS = PolicySettings(samples=4, max_new_tokens=6)
PROMPTS = [(key, {"prompt": text}) for key, text in enumerate(["a b c d e", "what was ", "1 2 3 4 5"])]


def policy_on(sizes, settings=SETTINGS, lora=None):
    devices = int(np.prod(list(sizes.values()), dtype=int))
    model = tiny.model()
    if lora is not None:
        adapters.add_lora(model, lora, rngs=nnx.Rngs(1))
    limits = EngineLimits(
        max_sequences=12 // devices,
        max_tokens_per_step=32,
        max_chunks_per_step=4,
        max_length=32,
        num_pages=16,
        replicas=devices,
    )
    model = laid_out(model, **sizes) if sizes else model
    return Policy(model, optax.sgd(0.1), settings, tokenizer=tiny.tokenizer(), limits=limits, rows=4 // devices)


def steps_of(policy, number=2):
    """Returns the answers and the metrics of each step, and the last parameters."""
    answers, metrics = [], []
    for step in range(number):
        drawn = policy.sample(PROMPTS, step=step, seed=0, ignore_eos=True, stop_token_ids=())
        groups = sorted(drawn, key=lambda group: group.key)
        rewards = [[[np.mean(each.tokens < 128)] for each in group.samples] for group in groups]
        answers.append([(each.seed, each.tokens.tolist()) for group in groups for each in group.samples])
        metrics.append(
            policy.update([replace(group, rewards=np.array(own)) for group, own in zip(groups, rewards, strict=True)])
        )
    return answers, metrics, jax.tree.map(np.array, policy.state.params)


@pytest.fixture(scope="module")
def one_device():
    """Returns the steps on one device, with and without adapters."""
    found = {}

    def steps(name, **options):
        if name not in found:
            with closing(policy_on({}, **options)) as policy:
                found[name] = steps_of(policy)
        return found[name]

    return steps


@pytest.mark.parametrize(
    "sizes, name",
    [
        (dict(fsdp=2), "full"),
        (dict(data=2), "adapters"),
        pytest.param(dict(data=2, fsdp=2), "full", marks=pytest.mark.thorough),
        pytest.param(dict(fsdp=2), "adapters", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_answers_and_steps_are_those_of_one_device(one_device, sizes, name):
    options = dict(lora=adapters.LoraSettings(rank=2), settings=replace(SETTINGS, beta=0.1)) if name == "adapters" else {}
    answers, metrics, params = one_device(name, **options)
    with closing(policy_on(sizes, **options)) as policy:
        found = steps_of(policy)
        assert all(stats.num_tokens for stats in policy.engine.stats_of_devices().values())
    assert found[0] == answers
    for ours, theirs in zip(found[1], metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for metric in [metric for metric in ours if not metric.startswith(("time/", "sampling/"))]:
            np.testing.assert_allclose(ours[metric], theirs[metric], rtol=1e-5, atol=1e-5, err_msg=metric)
    for ours, theirs in zip(jax.tree.leaves(found[2]), jax.tree.leaves(params), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
