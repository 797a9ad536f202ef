"""benchmarks/parallel_layer.py on CPU devices: each case measures, and agrees with one device."""

import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("exchange --transports gather", id="exchange"),
        pytest.param("experts --transports gather --routings zipf --tokens 32", id="experts", marks=pytest.mark.thorough),
        pytest.param("ring --methods ring --tokens 16", id="ring", marks=pytest.mark.thorough),
    ],
)
def test_a_small_case(monkeypatch, tmp_path, options):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    script, output = importlib.import_module("parallel_layer"), tmp_path / "rows.jsonl"
    arguments = [*options.split(), "--devices", "2", "--launches", "1", "--small", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["parallel_layer.py", *arguments])
    script.main(script.__doc__, script.CASES)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows and all(row["devices"] in (1, 2) and "failure" not in row for row in rows)
