"""A run of reinforcement learning with a real policy: the reward rises, and an interrupted run has equal bits."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.recipes import GrpoSettings, grpo, write_report
from moe_jax.recipes.grpo.settings import EngineSizes
from tests.helpers import tiny
from tests.recipes.test_grpo import comparable


def settings(folder, name, **changes):
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "what", "one two three", "x")))
    return GrpoSettings(
        model="none", data=str(data), output=str(folder / name), prompts=4, samples=8, max_new_tokens=8, seq_len=32, steps=8,
        learning_rate=3e-2, warmup_steps=0, dtype="float32", batch_size=8, checkpoint_every=2,
        engine=EngineSizes(max_sequences=32), **changes,
    )  # fmt: skip


@pytest.mark.long
def test_the_reward_rises_and_an_interrupted_run_has_equal_bits(tmp_path):
    """A judge fails in the middle of the fourth rollout, after the checkpoint of step 2."""
    calls, fails_at = [], None

    def small_tokens(completion_ids, **columns):
        if len(calls) == fails_at:
            calls.append(None)
            raise ConnectionError("the judge is away")
        calls.append(len(completion_ids))
        return [float(np.mean(np.asarray(tokens) < 128)) for tokens in completion_ids]

    def run(chosen):
        return grpo(chosen, rewards=[small_tokens], model=tiny.dense(), tokenizer=tiny.tokenizer())

    whole = run(settings(tmp_path, "whole"))
    first, *_ = whole.metrics
    rewards = [record["reward"] for record in whole.metrics]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    assert {"entropy", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "time/sync"} <= first.keys()
    assert len(calls) == 32
    fails_at = len(calls) + 14
    with pytest.raises(RuntimeError, match="the judge is away"):
        run(settings(tmp_path, "broken"))
    resumed = run(settings(tmp_path, "broken"))
    assert comparable(tmp_path / "broken") == comparable(tmp_path / "whole")
    assert len(calls) - calls.count(None) == 64
    for a, b in zip(*(jax.tree.leaves(nnx.state(each.model, nnx.Param)) for each in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)
    report = write_report(tmp_path / "whole").read_text()
    assert "Reinforcement learning of none" in report and report.count("<img") == 3 and "<th>reward</th>" in report
