"""Runs test files in processes with 8 CPU devices, within a time limit: a deadlock fails them."""

import os
import subprocess
import sys
from pathlib import Path

import cpu_flags
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = [*(HERE / "eight_devices").glob("test_*.py"), ROOT / "tests" / "experimental" / "test_ragged.py"]
SECONDS = 560
PROCESSES = 4
"""Each process runs every fourth file: a process takes as long to start as several tests take."""


@pytest.mark.long
@pytest.mark.parametrize("process", range(PROCESSES))
def test_on_eight_devices(process):
    files = sorted(map(str, FILES))[process::PROCESSES]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": cpu_flags.of_devices(8),
        # A device in a collective blocks a thread of XLA's pool. With fewer threads than devices the collective never ends.
        "NPROC": "16",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
