"""The log of a run survives crashes and damage: only steps with a bad line are lost."""

import json

import numpy as np
import pytest

from moe_jax.config import Qwen3MoeConfig
from moe_jax.train.metrics import MetricsWriter, read_records, record_of_step


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


def test_scalars_of_an_objective_of_ones_own_are_recorded():
    """Next-token prediction metrics are next to them; arrays, and names that every step uses, are left out."""
    metrics = dict(loss=2.0, num_tokens=8, kl=0.5, total_loss=3.0, mtp_loss=0.0, num_dropped=0, by_layer=[1, 2])
    metrics |= {"expert_load": [[4, 4]], "router_entropy": [0.5], "num_rounds": [1], "num_shadows": [0]}
    record = record_of_step(3, {name: np.asarray(value) for name, value in metrics.items()}, Qwen3MoeConfig(), 2.0, 10.0)
    assert (record["step"], record["loss"], record["kl"], record["tokens_per_second"]) == (3, 2, 0.5, 4)
    assert not {"total_loss", "by_layer", "mtp_loss", "expert_load"} & record.keys()
