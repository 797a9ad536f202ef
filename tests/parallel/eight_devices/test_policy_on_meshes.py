"""A policy that learns on a mesh draws the answers of one device, and takes the same steps."""

import json
import operator
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax import adapters
from moe_jax.recipes import GrpoSettings, grpo
from moe_jax.reinforcement import audit
from moe_jax.reinforcement.policy import Policy, whole_on_each_device
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving import EngineLimits
from tests.helpers import tiny
from tests.helpers.meshes import laid_out

SETTINGS = PolicySettings(samples=4, max_new_tokens=6, loss="gspo", importance="tis", importance_level="sequence")
LORA, WITH_REFERENCE = adapters.LoraSettings(rank=2), replace(SETTINGS, beta=0.1)
PROMPTS = [(key, {"prompt": text}) for key, text in enumerate(["a b c d e", "what was ", "1 2 3 4 5"])]


def policy_on(sizes, make_model=tiny.dense, settings=SETTINGS, lora=None, replicas=None):
    devices = int(np.prod(list(sizes.values()), dtype=int))
    model = make_model()
    if lora is not None:
        adapters.add_lora(model, lora, rngs=nnx.Rngs(1))
    # One sequence at a time needs the fewest programs.
    sizes_of_engine = dict(max_sequences=1, max_tokens_per_step=32, max_chunks_per_step=1, max_length=32, num_pages=16)
    limits = EngineLimits(**sizes_of_engine, replicas=replicas or devices)
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


@pytest.mark.parametrize(
    "sizes, name",
    [
        (dict(fsdp=2), "full"),
        pytest.param(dict(data=2), "adapters", marks=pytest.mark.thorough),
        pytest.param(dict(data=2, fsdp=2), "experts", marks=pytest.mark.thorough),
        pytest.param(dict(fsdp=2), "adapters", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_answers_and_steps_are_those_of_one_device(sizes, name):
    options = {
        "experts": dict(make_model=tiny.model),
        "adapters": dict(make_model=tiny.model, lora=LORA, settings=WITH_REFERENCE),
    }.get(name, {})
    with closing(policy_on({}, **options)) as policy:
        answers, metrics, params = steps_of(policy)
    with closing(policy_on(sizes, **options)) as policy:
        served = jax.tree.leaves(nnx.state(policy.drawing_model()))
        assert all(array.is_fully_replicated for array in served)
        if "fsdp" not in sizes:
            assert all(map(operator.is_, served, jax.tree.leaves(nnx.state(policy.model))))
        found = steps_of(policy)
        # Copies for a rollout are deleted before the update; the update donated the arrays that it shares with the engine.
        assert all(array.is_deleted() for array in served) or name == "adapters"
        assert all(stats.num_tokens for stats in policy.engine.stats_of_devices().values())
    assert found[0] == answers
    for ours, theirs in zip(found[1], metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for metric in [metric for metric in ours if not metric.startswith(("time/", "sampling/"))]:
            np.testing.assert_allclose(ours[metric], theirs[metric], rtol=1e-5, atol=1e-5, err_msg=metric)
    for ours, theirs in zip(jax.tree.leaves(found[2]), jax.tree.leaves(params), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.thorough
def test_a_policy_on_one_device_draws_on_two():
    answers = []
    for replicas in (1, 2):
        with closing(policy_on({}, make_model=tiny.model, replicas=replicas)) as policy:
            answers.append(steps_of(policy)[0])
            assert all(stats.num_tokens for stats in policy.engine.stats_of_devices().values())
    assert answers[0] == answers[1]


def test_each_device_audits_rows_of_its_own(monkeypatch, rng):
    """Values and experts equal one device's, for a number of rows that the devices do not divide."""

    def ordinary(model, tokens, segment_ids, *, max_segments, temperature, kv_dtype):
        states = model.hidden_states(tokens, segment_ids=segment_ids)
        return states.hidden.sum(axis=2)[:, :-1] / temperature, states.expert_ids

    monkeypatch.setattr(audit, "strict_pass", ordinary)
    tokens = rng.integers(0, 200, (5, 16)).astype(np.int32)
    batch, model = dict(tokens=tokens, segment_ids=np.ones_like(tokens)), tiny.model()
    found = [
        audit.strict_rows(each, batch, np.arange(5), 0.7)
        for each in (model, whole_on_each_device(laid_out(model, data=2, fsdp=2)))
    ]
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-4)
    np.testing.assert_array_equal(found[1][1], found[0][1])


@pytest.mark.thorough
def test_a_run_continues_after_a_failure(tmp_path):
    """A judge fails in the second rollout, after a checkpoint: rewards, losses and weights are an unbroken run's."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "what", "x = 1")))

    def run(name, fails=False):
        calls = []

        def small_tokens(completion_ids, **columns):
            calls.append(None)
            if fails and len(calls) == 4:
                raise ConnectionError("the judge is away")
            return [float(np.mean(np.asarray(tokens) < 128)) for tokens in completion_ids]

        settings = GrpoSettings(
            model="none", data=str(tmp_path / "prompts.jsonl"), output=str(tmp_path / name), prompts=2, samples=4, steps=3,
            max_new_tokens=6, seq_len=32, learning_rate=1e-3, warmup_steps=0, dtype="float32", checkpoint_every=1,
        )  # fmt: skip
        return grpo(settings, rewards=[small_tokens], model=laid_out(tiny.dense(), fsdp=2), tokenizer=tiny.tokenizer())

    whole = run("whole")
    with pytest.raises(RuntimeError, match="the judge is away"):
        run("broken", fails=True)
    resumed = run("broken")
    assert len(resumed.metrics) == 3
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        for name in ("reward", "completions/mean_length", "entropy", "grad_norm", "loss"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b in zip(*(jax.tree.leaves(nnx.state(each.model, nnx.Param)) for each in (resumed, whole)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)
