"""Preference data as tokens, as TRL makes them, and as batches: shuffled, packed, resumed."""

import json
from types import SimpleNamespace

import datasets
import jax
import numpy as np
import pytest

from moe_jax.preferences import open_preferences, preference_batches, reference_log_probs, reference_table
from moe_jax.preferences.batches import example_tokens
from tests.helpers import tiny
from tests.helpers import trl_reference as trl

ASK = {"role": "user", "content": "2+2?"}


def answer(text):
    return [{"role": "assistant", "content": text}]


CHATS = [
    dict(prompt=[ASK], chosen=answer("four"), rejected=answer("it is five")),
    dict(prompt=[ASK, *answer("four"), {"role": "user", "content": "sure?"}], chosen=answer("yes"), rejected=answer("no")),
]
TEXTS = [dict(prompt="2+2=", chosen="4", rejected="5 or 6"), dict(prompt="say ", chosen="hello", rejected="bye")]
WHOLE = [dict(chosen="Q: 2+2? A: four", rejected="Q: 2+2? A: six")]


def write(folder, records):
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("records", [CHATS, TEXTS, WHOLE], ids=["chats", "texts", "whole"])
def test_tokens_equal_those_of_trl(tmp_path, records):
    """They end as in fine-tuning on chats: the line break after the last end of turn is no part of the answer."""
    tokenizer = tiny.tokenizer()
    data = open_preferences(write(tmp_path, records), plain=True)
    example = example_tokens(data, tokenizer, 1000)
    trainer = trl.dpo_trainer("sigmoid", 0.1)
    trainer._tokenizer = tokenizer
    options = SimpleNamespace(dataset_num_proc=None, max_length=None)
    theirs = trainer._prepare_dataset(datasets.Dataset.from_list(records), tokenizer, options, "train")
    for index, expected in enumerate(theirs):
        for text, name in zip(example(index).texts, ("chosen", "rejected"), strict=True):
            prompt, ids = expected["prompt_ids"], expected[f"{name}_ids"]
            assert text.tokens.tolist() == prompt + ids
            learned = ids[:-1] if records is CHATS else ids
            assert text.tokens[text.learned].tolist() == learned
            assert not text.learned[: len(prompt)].any() and tokenizer.decode(learned[-1:]) in ("<|im_end|>", "<|end|>")


def test_special_tokens_that_a_text_has_are_not_added(tmp_path):
    pair = dict(prompt="<|im_start|>2+2=", chosen="4<|end|>", rejected="5<|end|>\n")
    tokenizer = tiny.tokenizer_with_a_beginning()
    found = example_tokens(open_preferences(write(tmp_path, [pair]), plain=True), tokenizer, 1000)(0)
    for text, answer in zip(found.texts, (pair["chosen"], pair["rejected"]), strict=True):
        assert tokenizer.decode(text.tokens) == pair["prompt"] + answer
        assert tokenizer.decode(text.tokens[text.learned]) == answer


def many(number):
    return [dict(prompt=f"say {i}", chosen="yes " * (i % 5 + 1), rejected="no " * (i % 3 + 1)) for i in range(number)]


@pytest.fixture
def pairs(tmp_path):
    return open_preferences(write(tmp_path, many(11)), plain=True)


SIZES = dict(seq_len=64, batch_size=2)


def test_batches(pairs):
    """An epoch has every pair once, in its own order; rows hold whole pairs as drawn; a position is found again."""
    stream = preference_batches(pairs, tiny.tokenizer(), **SIZES)
    first = next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    batches = [first, *(next(stream) for _ in range(6))]
    found = [set(batch["example"][batch["example"] >= 0].tolist()) for batch in batches]
    assert len(found[0]) > 2 and set.union(*found) == set(range(11)) and stream.position > len(pairs)
    again = preference_batches(pairs, tiny.tokenizer(), **SIZES)
    again.set_state(state)
    for batch in batches[1:]:
        resumed = next(again)
        for name, array in batch.items():
            np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    example = example_tokens(pairs, tiny.tokenizer(), 32)
    for row in range(2):
        for place, index in enumerate(first["example"][row]):
            for answer, segment in enumerate((2 * place + 1, 2 * place + 2)):
                inside = first["segment_ids"][row] == segment
                if index < 0:
                    assert not inside.any()
                    continue
                text = example(int(index)).texts[answer]
                np.testing.assert_array_equal(first["tokens"][row][inside], text.tokens)
                np.testing.assert_array_equal(first["labels"][row][inside][:-1], text.tokens[1:])
                np.testing.assert_array_equal(first["loss_mask"][row][inside], np.append(text.learned[1:], False))
                np.testing.assert_array_equal(first["positions"][row][inside], np.arange(inside.sum()))
    stream.close(), again.close()


def test_epochs_have_all_examples_in_other_orders(pairs):
    stream = preference_batches(pairs, tiny.tokenizer(), **SIZES)
    orders = [[stream._index(epoch * 11 + i) for i in range(11)] for epoch in range(2)]
    assert all(sorted(order) == list(range(11)) for order in orders) and orders[0] != orders[1] != list(range(11))
    assert preference_batches(pairs, tiny.tokenizer(), **SIZES, seed=None)._index(4) == 4


def test_long_texts(tmp_path):
    """They are cut at their end; where the prompt fills the row, the example is left out and counted."""
    records = [
        *many(3),
        dict(prompt="long " * 20, chosen="yes", rejected="no"),
        dict(prompt="a", chosen="b" * 90, rejected="c"),
    ]
    data = open_preferences(write(tmp_path, records), plain=True)
    stream = preference_batches(data, tiny.tokenizer(), seq_len=64, batch_size=3, seed=None)
    batch = next(stream)
    assert stream.skipped == {3} and 4 in batch["example"]
    row, place = np.argwhere(batch["example"] == 4)[0]
    lengths = [(batch["segment_ids"][row] == 2 * place + answer).sum() for answer in (1, 2)]
    assert lengths == [32, 3]
    with pytest.raises(ValueError, match="max_length=40 must be from 2 to 32"):
        preference_batches(data, tiny.tokenizer(), **SIZES, max_length=40)
    data = open_preferences(write(tmp_path, many(3)), plain=True)
    with pytest.raises(ValueError, match="no prompt leaves room for its answers in max_length=2 tokens"):
        next(preference_batches(data, tiny.tokenizer(), **SIZES, max_length=2))
    stream.close()


def test_pairs_that_a_cut_makes_equal_are_left_out(tmp_path):
    pair = dict(prompt="say", chosen=" yes, please", rejected=" yes, thanks")
    data = open_preferences(write(tmp_path, [pair, many(1)[0]]), plain=True)
    stream = preference_batches(data, tiny.tokenizer(), seq_len=64, batch_size=1, max_length=9, seed=None)
    batch = next(stream)
    stream.close()
    assert stream.skipped == {0} and set(batch["example"].ravel()) == {1, -1}
    whole = preference_batches(data, tiny.tokenizer(), seq_len=64, batch_size=1, seed=None)
    assert 0 in next(whole)["example"] and not whole.skipped
    whole.close()


def test_mismatched_answers(tmp_path):
    """Single answers are paired with the answer of the nearest record before that has another prompt."""
    data = open_preferences(write(tmp_path, many(4)), of_pairs=False, plain=True)
    tokenizer = tiny.tokenizer()
    stream = preference_batches(data, tokenizer, seq_len=64, batch_size=2, seed=None)
    batch = next(stream)
    said = {}
    for row, place in np.argwhere(batch["example"] >= 0):
        for prefix in ("", "kl_"):
            inside = batch[prefix + "segment_ids"][row] == place + 1
            said[int(batch["example"][row, place]), prefix] = tokenizer.decode(batch[prefix + "tokens"][row][inside])
    assert said[2, ""] == "say 1yes yes <|end|>" and said[3, ""] == "say 1no no <|end|>"
    assert said[2, "kl_"] == said[3, "kl_"] == "say 1no <|end|>"
    assert batch["desirable"][batch["example"] == 2] == 1 and batch["desirable"][batch["example"] == 3] == 0
    stream.close()


def test_reference_table(pairs):
    """Batches with a table hold the log-probabilities that the model gives of the batch itself."""
    model, told = tiny.dense(), []
    in_order = preference_batches(pairs, tiny.tokenizer(), **SIZES, seed=None)
    table = reference_table(model, in_order, lambda done, all_: told.append((done, all_)))
    assert table.shape == (11, 2) and np.isfinite(table).all() and told[-1] == (11, 11)
    stream = preference_batches(pairs, tiny.tokenizer(), **SIZES, reference=table)
    batch = next(stream)
    own = jax.jit(lambda batch: reference_log_probs(model, batch))(batch)
    np.testing.assert_allclose(batch["reference_log_probs"], own, rtol=1e-5, atol=1e-5)
    assert not batch["reference_log_probs"][batch["example"] < 0].any()
    with pytest.raises(ValueError, match="give seed=None"):
        reference_table(model, stream)
    stream.close()
