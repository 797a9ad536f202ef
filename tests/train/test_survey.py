"""The survey of a data set before training agrees with its batches."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moe_jax.train import batches, open_documents, survey
from tests.helpers import tiny

SHORT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
LONG = [*SHORT, {"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "no"}]

REFUSING = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('refused') }}{% endif %}" + tiny.CHATML


def chats(folder, *conversations):
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return open_documents(file)


def test_tokens_learned_share_and_cuts_are_counted(tmp_path):
    documents = chats(tmp_path, *[SHORT] * 3, LONG)
    found = survey(documents, tiny.tokenizer(), seq_len=64)

    # A turn is <|im_start|>, role, line break, content, <|im_end|>, line break; answers and their ends are learned.
    def turn(role, length):
        return 1 + len(role) + 1 + length + 1 + 1

    short = turn("user", 2) + turn("assistant", 3)
    assert found.exact and found.documents == 4
    assert found.tokens == 4 * short + turn("user", 40) + turn("assistant", 2)
    assert found.learned == pytest.approx((3 * 4 + 4 + 3) / found.tokens)
    assert (found.cut, found.answers, found.answers_cut) == (1, 5, 1)
    assert survey(documents, tiny.tokenizer(), seq_len=128).answers_cut == 0


def test_weights_are_averaged(tmp_path):
    """Over learned tokens, which are counted as without weights."""
    plain, weighted = chats(tmp_path, SHORT, LONG), None
    expected = survey(plain, tiny.tokenizer(), seq_len=64)
    weighted = chats(tmp_path, [SHORT[0], SHORT[1] | {"weight": 0.5}], [*LONG[:3], LONG[3] | {"weight": 3}])
    found = survey(weighted, tiny.tokenizer(), seq_len=64)
    assert weighted.weighted and not plain.weighted and expected.mean_weight == 1
    # Answers are "yes", "yes" and "no", each with its end.
    assert found == replace(expected, mean_weight=(0.5 * 4 + 4 + 3 * 3) / 11)


def test_epochs_and_padding_are_those_of_the_batches(tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    found = survey(documents, tiny.tokenizer(), seq_len=64)
    steps = found.steps(20, batch_size=4)
    stream = batches(documents, tiny.tokenizer(), seq_len=64, batch_size=4)
    rows = [next(stream) for _ in range(steps)]
    assert found.epochs(steps, 4) == pytest.approx(20, abs=0.2)
    learned = np.concatenate([batch["document"][batch["loss_mask"] > 0] for batch in rows])
    lengths = [len(tiny.tokenizer()(documents[i]["text"])["input_ids"]) for i in range(9)]
    np.testing.assert_allclose(np.bincount(learned) / lengths, 20, atol=2)
    assert np.mean([(batch["segment_ids"] == 0).mean() for batch in rows]) == pytest.approx(found.padding, abs=0.02)


def test_a_sample_stands_for_the_whole(tmp_path):
    documents = open_documents(tiny.write_texts(tmp_path))
    whole = survey(documents, tiny.tokenizer(), seq_len=64, max_documents=None, max_seconds=None)
    sample = survey(documents, tiny.tokenizer(), seq_len=64, max_documents=4)
    assert sample.measured == 4 and not sample.exact and sample.tokens == pytest.approx(whole.tokens, rel=0.02)
    assert survey(documents, tiny.tokenizer(), seq_len=64, max_seconds=0).measured == 1


def test_refused_conversations_are_an_error_or_counted(tmp_path):
    """`skip_bad` counts the bad documents."""
    documents = chats(tmp_path, SHORT, LONG[1:], SHORT)
    with pytest.raises(ValueError, match="1 of 3 conversations begin with the assistant's message"):
        survey(documents, tiny.tokenizer(), seq_len=64)
    found = survey(documents, tiny.tokenizer(), seq_len=64, skip_bad=True)
    assert (found.skipped, found.answers) == (1, 2)


def test_a_sample_reaches_to_the_first_usable_document(tmp_path):
    """After both limits, in any order; where there is none, the last reason is raised."""
    bad, tokenizer = [{"role": "user", "content": "bad"}, SHORT[1]], tiny.tokenizer(REFUSING)
    documents = chats(tmp_path, *[bad] * 20, SHORT)
    for seed in range(5):
        found = survey(documents, tokenizer, seq_len=64, seed=seed, skip_bad=True, max_documents=1, max_seconds=0)
        assert found.answers > 0 and found.skipped == round((found.measured - 1) * 21 / found.measured)
    with pytest.raises(
        ValueError, match=r"nothing to learn: all 20 documents .*chats.jsonl:\d+ .*refused; give a chat template"
    ):
        survey(chats(tmp_path, *[bad] * 20), tokenizer, seq_len=64, skip_bad=True, max_documents=1)
