"""A run's data may be several sources in several layouts; the numbers printed before it describe what is learned."""

import json

import pytest

from moe_jax.recipes import dry_run
from moe_jax.recipes.finetuning.prepare import plan_run
from tests.helpers import tiny
from tests.helpers.tiny import settings

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.fixture
def data(tmp_path):
    """Twelve pairs with two weights, and four texts, one of them bad."""
    (tmp_path / "pairs.csv").write_text("prompt,completion,id\n" + "hello,hi,1\n" * 12)
    (tmp_path / "texts.json").write_text(json.dumps([{"text": "plain words"}] * 4 + [{"text": 3}]))
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n" + '{"messages": 3}\n')
    return f"{tmp_path}/pairs.csv,weight=1", f"{tmp_path}/texts.json,weight=1"


def run(function, folder, **changes):
    changes = dict(seq_len=64, skip_bad_documents=True) | changes
    return function(settings(folder, **changes), model=tiny.dense(), tokenizer=tiny.tokenizer())


def test_the_announcement_says_how_often_each_source_is_learned(tmp_path, data, capsys, caplog):
    run(dry_run, tmp_path, data=data, eval_data=f"{tmp_path}/held.jsonl")
    printed = capsys.readouterr().out
    assert f"{tmp_path}/pairs.csv: pairs, 12 documents, weight 1: 8 of 16 in an epoch, each 0.667 times, " in printed
    assert "; keys that are not read: id\n" in printed and "texts.json: text, 4 documents, weight 1: 8 of 16" in printed
    assert f"1 bad row left out: {tmp_path}/texts.json:1: " in printed
    assert f"left out of the held-out data: {tmp_path}/held.jsonl:2: " in caplog.text


def test_a_run_continues_with_its_weights_and_answers_alone(tmp_path, data):
    """The identity of a run holds both; without them it is the one of earlier versions."""

    def identity(**changes):
        return run(plan_run, tmp_path, **changes).identity["data"]

    chats = str(tmp_path / "held.jsonl")
    other = (data[0].replace("weight=1", "weight=2"), data[1])
    found = [identity(**changes) for changes in (dict(data=data), dict(data=other), dict(data=chats))]
    found_last, found_mask = identity(data=chats, learned_answers="last"), identity(data=chats, empty_thinking="mask")
    assert len({*found, found_last, found_mask}) == 5
    assert identity(data=(chats,), skip_bad_documents=True) == found[2]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(data=("{}/pairs.csv", "{}/none.csv")), "data='.*none.csv' does not exist"),
        (dict(data="{}/pairs.csv,wieght=2"), "'wieght=2' is no option"),
        (dict(data=""), "data='' does not exist"),
        (dict(data=()), "no data: give a file"),
        (dict(data="{}/pairs.csv", output="{}/pairs.csv/run"), "must be outside of data="),
        (dict(data="{}/pairs.csv", learned_answers="first"), "learned_answers='first' must be one of all, last"),
        (dict(data="{}/pairs.csv", empty_thinking="drop"), "empty_thinking='drop' must be one of learn, mask"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_read(tmp_path, data, changes, message):
    def filled(value):
        return value.format(tmp_path) if isinstance(value, str) else tuple(map(filled, value))

    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **{name: filled(value) for name, value in changes.items()})


def test_held_out_text_of_the_data_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="must not be trained on, but .*pairs.csv.* has .*pairs.csv too"):
        run(dry_run, tmp_path, data=data, eval_data=f"{tmp_path}/pairs.csv")
