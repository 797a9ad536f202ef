"""The log of a run survives crashes and damage: only steps with a bad line are lost."""

import json

import pytest

from moe_jax.train.metrics import MetricsWriter, read_records


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(file, *lines):
    file.write_text("".join(f"{line}\n" for line in lines))


def step(number, **more):
    return json.dumps({"step": number, **more})


def test_a_bad_line_in_the_middle_loses_no_step_behind_it(file, caplog):
    write(file, step(1), '{"step": 2, "lo', "[]", '"text"', '{"loss": 1.0}', step(3))
    MetricsWriter(file.parent, resumed_step=3)
    assert [f"{file}:{line} is no record of a step; left out" for line in (2, 3, 4, 5)] == caplog.messages
    assert file.read_text() == f"{step(1)}\n{step(3)}\n"


def test_a_last_line_cut_off_by_a_crash_goes_silently(file, caplog):
    file.write_bytes(step(1).encode() + b'\n{"step": 2, "text": "\xc3')
    assert read_records(file) == [{"step": 1}] and not caplog.messages


def test_a_step_that_stands_there_twice_counts_as_written_last(file):
    write(file, step(1, loss=1.0), step(2, loss=2.0), step(1, loss=3.0), step(4))
    MetricsWriter(file.parent, resumed_step=2)
    assert read_records(file) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
