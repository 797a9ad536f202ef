"""Collectives inside a rank's branch: those with groups end, and a `ppermute`, let through, hangs.

Both in processes of their own with a time limit. `eight_devices/test_table_toy.py` sees that it is not let through.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
from tests.helpers import pipelines
from tests.helpers.toy_pipeline import assert_counts_once
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.pipeline import executor

TRAVEL = {
    "all_to_all": lambda x: jax.lax.all_to_all(jnp.stack([x, x]), "expert", 0, 0).sum() / 2,
    "all_gather": lambda x: jax.lax.all_gather(x, "expert").sum() / 2,
    "psum": lambda x: jax.lax.pcast(jax.lax.psum(x, "expert"), "expert", to="varying") / 2,
    "ppermute": lambda x: hop(x, "expert", 1),
}
names = sys.argv[1:]
# Without the search for transfers that would hang.
executor.checked_branch = lambda branch, *arguments: branch
print("begins", flush=True)
for name in names:
    assert_counts_once(pipelines.MAKE["1f1b"](2, 1, 4), 4, TRAVEL[name], expert=2)
print("ends", flush=True)
"""


def run(*names, seconds):
    """Returns the output of a process that runs a step of 1F1B for each collective; None in place of its end."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", SCRIPT, *names]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            return process.communicate(timeout=seconds)[0].split()
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0].split()


def test_collectives_with_groups_end():
    assert run("all_to_all", "all_gather", "psum", seconds=120) == ["begins", "ends"]


@pytest.mark.thorough
def test_a_permutation_hangs():
    """Its ranks wait for all devices, some of them in another branch."""
    assert run("ppermute", seconds=40) == ["begins"]
