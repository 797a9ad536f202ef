"""A computation changes file seldom: a reader follows it through few files."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_repository import ROOT


@pytest.fixture(scope="module")
def changes_of_file():
    program = [sys.executable, ROOT / "tests/helpers/trace_hops.py"]
    done = subprocess.run(program, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "road, most",
    [
        ("decoder", 70),
        ("experts_mlp", 10),
        ("step", 260),
        ("engine", 90),
    ],
)
def test_a_computation_changes_file_seldom(changes_of_file, road, most):
    assert changes_of_file[road] <= most
