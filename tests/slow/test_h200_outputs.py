"""Outputs of scripts are kept, and made anew when anything changes that they depend on."""

from pathlib import Path

import pytest

import moe_jax.config.base
from tests.helpers import h200_outputs


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs a script which reads one file, and returns its output and the number of runs so far."""
    monkeypatch.setattr(h200_outputs, "KEPT", tmp_path)
    monkeypatch.setattr("tests.helpers.h200_programs.KEPT", tmp_path)
    read, runs = tmp_path / "read.py", []

    def script(environment):
        runs.append(environment)
        Path(environment[h200_outputs.LIST]).write_text(str(read))
        return read.read_text()

    def output(text, word="1", **environment):
        read.write_text(text)
        return h200_outputs.output_of(["python", word], environment, tmp_path, script), len(runs)

    return output


def test_outputs_are_kept_until_anything_changes(run, tmp_path):
    assert run("a") == run("a") == ("a", 1)
    assert run("b") == run("b") == ("b", 2)
    assert run("b", word="2") == ("b", 3)
    assert run("b", XLA_FLAGS="c") == ("b", 4)
    assert run("b", JAX_COMPILATION_CACHE_DIR="anywhere") == ("b", 4)
    (tmp_path / "jax_cuda-1.dist-info").mkdir()
    assert run("b") == ("b", 5)


def test_files_are_those_of_the_package_and_the_tests():
    files = h200_outputs.files_read()
    assert {moe_jax.__file__, moe_jax.config.base.__file__, h200_outputs.__file__} <= set(files)
    assert any(name.endswith("tiles.json") for name in files) and not any("site-packages" in name for name in files)
