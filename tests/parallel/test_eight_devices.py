"""Runs each file of `eight_devices/` in a process with 8 CPU devices, within a time limit: a deadlock fails it."""

import os
import subprocess
import sys
from pathlib import Path

import cpu_flags
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 560


@pytest.mark.long
@pytest.mark.parametrize("path", sorted((HERE / "eight_devices").glob("test_*.py")), ids=lambda path: path.stem)
def test_on_eight_devices(path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": cpu_flags.of_devices(8),
        # Each device blocks a thread of XLA's pool in a collective.
        "NPROC": "16",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
