"""A run of reinforcement learning that is killed at any moment ends with the bits of an unbroken one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.recipes.grpo import loop
from tests.helpers import run_grpo
from tests.recipes.test_grpo import comparable

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def the_policy_comes_back(monkeypatch):
    monkeypatch.setattr(loop, "Policy", loop.Policy)


def asked_of(output):
    file = output.with_suffix(".asked")
    return file.read_text().splitlines() if file.exists() else []


def test_kill_minus_nine_at_a_random_moment(tmp_path, rng, without_torch):
    """Samples, metrics, weights: byte for byte. A reward is asked again only if the kill came before it was in the journal."""
    whole, output = run_grpo.run(tmp_path / "whole"), tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.run_grpo", str(output)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    # The moment is a number of calls of the reward, and a part of the time of a step.
    calls, delay, deadline = rng.integers(1, 18), rng.uniform(0, 0.08), time.monotonic() + 120
    while len(set(asked_of(output))) < calls and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    error = process.communicate()[1].decode()
    assert process.returncode in (0, -signal.SIGKILL), error[-3000:]
    resumed = run_grpo.run(output)
    assert comparable(output) == comparable(tmp_path / "whole")
    for a, b in zip(*(jax.tree.leaves(nnx.state(each.model, nnx.Param)) for each in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)
    asked, expected = asked_of(output), asked_of(tmp_path / "whole")
    assert set(asked) == set(expected) and len(expected) == run_grpo.STEPS * run_grpo.PROMPTS
    assert len(asked) - len(expected) <= 1
