"""A run on a stream of the hub: it prints which rows were measured, and continues bit for bit where it was stopped."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from moe_jax.recipes import dry_run, finetune
from moe_jax.train.data import hub
from tests.helpers import tiny
from tests.helpers.tiny import settings

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    """A stream of 60 chats; the last ones have weights; the first 40 are looked at."""

    def rows():
        for i in range(60):
            weight = {"weight": 0.5} if i >= 50 else {}
            answer = {"role": "assistant", "content": f"answer {i}", **weight}
            yield {"messages": [{"role": "user", "content": "again and " * (i % 4)}, answer]}

    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: datasets.IterableDataset.from_generator(rows))
    monkeypatch.setattr(hub, "FIRST_ROWS", 40)


def run(folder, stop_after=None, **changes):
    asked = replace(settings(folder, steps=6, seq_len=64, data="owner/name,stream=true"), **changes)
    return finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=stop_after)


def test_a_run_continues_bit_for_bit(tmp_path, capsys, steps_that_add):
    whole = run(tmp_path / "whole")
    assert "the first 40 conversations of a stream: " in capsys.readouterr().out
    run(tmp_path / "parts", stop_after=3)
    parts = run(tmp_path / "parts")
    assert "a stream of conversations; steps 4 to 6, " in capsys.readouterr().out
    assert [record["loss"] for record in parts.metrics] == [record["loss"] for record in whole.metrics]
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(result.model) for result in (parts, whole)))


def test_epochs_are_refused(tmp_path):
    asked = replace(settings(tmp_path, data="owner/name,stream=true", seq_len=64), steps=1000, epochs=2, dry_run=True)
    with pytest.raises(
        ValueError, match="epochs=2 needs the number of documents, which a stream does not tell: give steps, or"
    ):
        dry_run(asked, model=tiny.dense(), tokenizer=tiny.tokenizer())
