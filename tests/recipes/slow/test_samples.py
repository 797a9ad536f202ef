"""Samples of text in the log leave a run's bits alone, and a run that continues has each sample once."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.generation.text import complete
from moe_jax.recipes import finetune
from moe_jax.recipes.finetuning.samples import Sampler
from moe_jax.recipes.run.run_log import SAMPLES
from moe_jax.train.metrics import read_records
from tests.helpers import tiny


def train(asked, stop_after=None):
    return finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=stop_after)


def test_samples_leave_the_bits(tmp_path, capsys, one_step_for_all):
    runs = {}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the same\n\ntext 1\n")
    sampled = dict(sample_prompts=(str(prompts), "words"), sample_every=2, sample_tokens=4)
    for name, options in (("plain", {}), ("sampled", sampled)):
        (tmp_path / name).mkdir()
        asked = tiny.settings(tmp_path / name, steps=5, checkpoint_every=2, **options)
        if options:
            train(asked, 3)
            with (tmp_path / name / "run" / SAMPLES).open("a") as log:  # as a run that was killed after its checkpoint
                log.write('{"step": 4, "samples": []}\n')
        result = train(asked)
        losses = [record["loss"] for record in read_records(tmp_path / name / "run" / "metrics.jsonl")]
        runs[name] = losses, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(result.model, nnx.Param))]
    assert runs["plain"][0] == runs["sampled"][0]
    assert all(map(np.array_equal, runs["plain"][1], runs["sampled"][1]))

    lines = (tmp_path / "sampled" / "run" / SAMPLES).read_text().splitlines()
    records = list(map(json.loads, lines))
    assert [record["step"] for record in records] == [2, 4, 5]
    last = records[-1]["samples"]
    assert [each["prompt"] for each in last] == ["the same", "text 1", "words"]
    expected = complete(result.model, ["the same", "text 1", "words"], tokenizer=tiny.tokenizer(), max_new_tokens=4)
    assert [each["text"] for each in last] == expected
    assert "samples after step 5:\n" in capsys.readouterr().out
    assert not (tmp_path / "plain" / "run" / SAMPLES).exists()


def test_chats_are_answered():
    sampler = Sampler(("a question",), tiny.tokenizer(), as_chat=True, max_tokens=3)
    model = tiny.dense()
    rendered = "<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n"
    # The end of an answer, <|im_end|>, ends a sample, and none is near here.
    assert sampler(model) == [complete(model, rendered, tokenizer=tiny.tokenizer(), max_new_tokens=3)]


def test_bad_prompts_are_refused_before_weights(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    for prompts, message in (((str(tmp_path / "empty.txt"),), "holds no prompt"), (("",), "holds no prompt")):
        with pytest.raises(ValueError, match=message):
            finetune(tiny.settings(tmp_path, sample_prompts=prompts), tokenizer=tiny.tokenizer(), model=tiny.dense())
    assert not (tmp_path / "run").exists()
