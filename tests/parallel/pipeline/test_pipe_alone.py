"""benchmarks/pipe_alone.py on a CPU: a rank played alone runs all kinds of ticks, and one rank is plain accumulation."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "pipe_alone.py"


def results_of(monkeypatch, tmp_path, *options):
    """Runs the benchmark, and returns what it wrote into $OUT."""
    spec = importlib.util.spec_from_file_location("pipe_alone", FILE)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pipe_alone.py", "--small", "--repeats", "1", *options])
    benchmark.main()
    return json.loads((tmp_path / "pipe_alone.json").read_text())


@pytest.mark.thorough
def test_ticks(monkeypatch, tmp_path):
    (alone,) = results_of(monkeypatch, tmp_path, "--remat", "yes", "--skip-plain")["alone"]
    assert list(alone["ticks"]) == list(alone["predicted_ticks"]) == ["F", "F+B+loss", "F+B", "B"]
    assert all(map(math.isfinite, alone["ticks"].values())) and alone["predicted_gib"] > 0


@pytest.mark.thorough
def test_one_rank(monkeypatch, tmp_path):
    found = results_of(monkeypatch, tmp_path)
    piped, plain = found["plain"]["piped"], found["plain"]["plain"]
    assert piped["value"] == pytest.approx(plain["value"], rel=1e-5)
    assert piped["norm"] == pytest.approx(plain["norm"], rel=1e-3)
    assert [row["remat"] for row in found["alone"]] == [True, False]
