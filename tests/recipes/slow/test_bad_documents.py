"""A conversation that the chat template refuses in the middle of a run loses no step, and does not end the run for good."""

import json
import re
from functools import partial

import numpy as np
import pytest

from moe_jax.checkpoint.training import finished_steps
from moe_jax.recipes import finetune
from moe_jax.train import batches, open_documents, survey
from moe_jax.train.metrics import read_records
from tests.helpers import tiny

TEMPLATE = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('refused') }}{% endif %}" + tiny.CHATML


def chats(folder, *asked):
    """A file of a conversation for each question."""
    path = folder / "chats.jsonl"
    answer = {"role": "assistant", "content": "some words for an answer"}
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}, answer]}) + "\n" for q in asked))
    return path


def options(folder, **changes):
    # Four steps are taken before the first bad conversation, with this seed.
    data = dict(data=str(chats(folder, *"a" * 40, "bad", *"b" * 40, "bad")), seed=10)
    return dict(**data, steps=6, warmup_steps=0, seq_len=128, batch_size=8, **changes)


def run(folder, **changes):
    settings = tiny.settings(folder, **options(folder, **changes))
    return finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer(TEMPLATE))


def comparable(output):
    return [(record["step"], record["loss"], record["grad_norm"]) for record in read_records(output / "metrics.jsonl")]


def test_resume_without_the_bad_document(tmp_path, capsys, monkeypatch, steps_that_add):
    """Steps before the bad document are saved, and the run continues without it."""
    # Of many conversations the survey at the start sees a sample, here one.
    monkeypatch.setattr("moe_jax.recipes.finetuning.prepare.survey", partial(survey, max_documents=1))
    with pytest.raises(
        ValueError, match=r"chats.jsonl:(41|82) .*refused; --skip-bad-documents skips .*; the run is saved at step 4$"
    ):
        run(tmp_path)
    assert finished_steps(tmp_path / "run" / "checkpoints") == [4]
    run(tmp_path, skip_bad_documents=True)
    assert re.search(
        r"skipped so far: [12] conversation\(s\) that the chat template refuses; .*:(41|82) ", capsys.readouterr().out
    )
    run(tmp_path, skip_bad_documents=True, output=str(tmp_path / "whole"))
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole") and len(comparable(tmp_path / "run")) == 6


def test_of_few_conversations_it_is_named_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"chats.jsonl:(41|82) .*refused; --skip-bad-documents skips .* in a resumed run$"):
        run(tmp_path)
    assert not (tmp_path / "run").exists()


def test_an_error_leaves_the_position_before_the_batch(tmp_path):
    # Two streams of 32 rows: the bad conversation is in one of them, and the others have read on.
    documents = open_documents(chats(tmp_path, *"a" * 60, "bad", *"b" * 40))
    given, skipping = (
        batches(documents, tiny.tokenizer(TEMPLATE), seq_len=64, batch_size=64, seed=1, skip_bad=skip) for skip in (False, True)
    )
    count = 0
    with pytest.raises(ValueError, match="refused"):
        while True:
            next(given), next(skipping)
            count += 1
    assert count > 0
    skipping.set_state(given.get_state())
    again = batches(documents, tiny.tokenizer(TEMPLATE), seq_len=64, batch_size=64, seed=1, skip_bad=True)
    expected = [next(again) for _ in range(count + 1)][-1]
    found = next(skipping)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert list(skipping.skipped) == [60]
    for stream in (given, skipping, again):
        stream.close()


def test_conversations_that_are_all_refused_are_no_data(tmp_path):
    documents = open_documents(chats(tmp_path, "bad", "bad"))
    message = (
        r"nothing to learn: all 2 documents that were read of \S*chats.jsonl are left out; the last: .*chats.jsonl:[12] "
        r".*refused; give a chat template .*, or other data$"
    )
    with pytest.raises(ValueError, match=message):
        next(batches(documents, tiny.tokenizer(TEMPLATE), seq_len=32, batch_size=2, skip_bad=True))


def test_conversations_that_begin_with_an_answer_can_be_skipped(tmp_path):
    path = chats(tmp_path, "a", "b")
    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "hello"}]}) + "\n")
    documents = open_documents(path)
    with pytest.raises(
        ValueError, match="1 of 3 conversations begin with the assistant's message.*leave them out with --skip-bad"
    ):
        batches(documents, tiny.tokenizer(), seq_len=32, batch_size=1)
    stream = batches(documents, tiny.tokenizer(), seq_len=32, batch_size=1, skip_bad=True)
    seen = {index for _ in range(20) for index in np.unique(next(stream)["document"])}
    stream.close()
    assert seen <= {-1, 0, 1} and list(stream.skipped) == [2]
