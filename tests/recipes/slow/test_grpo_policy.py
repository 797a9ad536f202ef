"""A run of reinforcement learning with a real policy: the reward rises, and an interrupted run has equal bits."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.recipes import GrpoSettings, grpo, write_report
from moe_jax.recipes.grpo.settings import EngineSizes
from tests.helpers import tiny
from tests.recipes.test_grpo import comparable


def settings(folder):
    """The engine has the sizes of the one in docs/reinforcement.md, so that its programs are compiled once."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "what", "one two three", "x")))
    return GrpoSettings(
        model="none", data=str(data), output=str(folder / "run"), prompts=4, samples=8, max_new_tokens=8, seq_len=64, steps=8,
        learning_rate=3e-2, warmup_steps=0, dtype="float32", batch_size=8, checkpoint_every=2,
        engine=EngineSizes(max_sequences=8),
    )  # fmt: skip


@pytest.mark.long
def test_the_reward_rises_and_an_interrupted_run_has_equal_bits(tmp_path):
    """A copy of the folder at step 7, as a killed process leaves it, continues. Rewards in its journal are not asked again."""
    asked, run_folder = [], tmp_path / "run"

    def small_tokens(completion_ids, **columns):
        asked.append(columns)
        return [float(np.mean(np.asarray(tokens) < 128)) for tokens in completion_ids]

    def copy_in_step_7(record):
        if record["step"] == 7:
            shutil.copytree(run_folder, tmp_path / "killed")

    def run(**options):
        return grpo(settings(tmp_path), rewards=[small_tokens], model=tiny.dense(), tokenizer=tiny.tokenizer(), **options)

    whole = run(on_step=copy_in_step_7)
    first, *_ = whole.metrics
    rewards = [record["reward"] for record in whole.metrics]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    assert {"entropy", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "time/sync"} <= first.keys()
    assert len(asked) == 32
    report = write_report(run_folder).read_text()
    assert "Reinforcement learning of none" in report and report.count("<img") == 3 and "<th>reward</th>" in report
    expected = comparable(run_folder)
    shutil.rmtree(run_folder)
    (tmp_path / "killed").rename(run_folder)
    resumed = run()
    assert comparable(run_folder) == expected and len(asked) == 32 + 4
    for a, b in zip(*(jax.tree.leaves(nnx.state(each.model, nnx.Param)) for each in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)
