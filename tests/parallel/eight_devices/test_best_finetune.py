"""The best checkpoint of a run whose experts move between devices, and samples of text on a mesh."""

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import finetune
from moe_jax.recipes.finetuning import loop
from moe_jax.train import model_of_run
from moe_jax.train.metrics import read_records
from tests.helpers import tiny

LOSSES = {1: 2.0, 2: 1.0, 3: 3.0, 4: 4.0}


@pytest.mark.thorough
def test_the_best_step_is_exported_with_its_places(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_evaluation", lambda *_, **__: lambda state, batches: LOSSES[int(state.step)])
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "other.txt").write_text("other words")
    settings = tiny.settings(
        tmp_path, model=str(tmp_path / "model"), batch_size=8, steps=4, eval_data=str(tmp_path / "held_out"), eval_every=1,
        eval_batches=1, keep_best=True, keep_checkpoints=1, mesh=MeshShape(data=2, fsdp=2, expert=2), rebalance_every=1,
        sample_prompts=("the same",), sample_every=2, sample_tokens=3,
    )  # fmt: skip
    result = finetune(settings)
    assert (result.step, result.model_step) == (4, 2)
    best = model_of_run(tmp_path / "run", step=2, dtype="float32")
    for trained, saved in zip(*(jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (result.model, best)), strict=True):
        np.testing.assert_array_equal(np.asarray(trained), np.asarray(saved))
    sampled = read_records(tmp_path / "run" / "samples.jsonl")
    assert [record["step"] for record in sampled] == [2, 4]
    assert sampled[0]["samples"][0]["text"] == moe_jax.complete(best, "the same", tokenizer=tiny.tokenizer(), max_new_tokens=3)
