"""Every layout of a line becomes a prompt and its answers; bad lines are named by file and line."""

import json

import pytest

from moe_jax.preferences import open_preferences
from moe_jax.preferences.documents import Judged, judged


def message(role, content):
    return {"role": role, "content": content}


ASK, GOOD, BAD = message("user", "2+2?"), message("assistant", "four"), message("assistant", "five")
BOTH = ([GOOD], [BAD])
LAYOUTS = {
    "strings": (dict(prompt="2+2?", chosen="four", rejected="five"), Judged([ASK], BOTH)),
    "messages": (dict(prompt=[ASK], chosen=[GOOD], rejected=[BAD]), Judged([ASK], BOTH)),
    "prompt repeated in the answers": (dict(prompt=[ASK], chosen=[ASK, GOOD], rejected=[ASK, BAD]), Judged([ASK], BOTH)),
    "prompt repeated with null keys": (
        dict(prompt=[ASK], chosen=[ASK | {"tool_calls": None}, GOOD], rejected=[ASK | {"weight": None}, BAD | {"name": None}]),
        Judged([ASK], BOTH),
    ),
    "contents in parts, and turns": (
        dict(
            prompt=[message("user", [{"type": "text", "text": "2+"}, "2?"])],
            chosen=[GOOD],
            rejected=[dict(value="five") | {"from": "gpt"}],
        ),
        Judged([ASK], BOTH),
    ),
    "conversations": (dict(chosen=[ASK, GOOD], rejected=[ASK, BAD]), Judged([ASK], BOTH)),
    "text beside conversations": (dict(prompt="2+2?", chosen=[ASK, GOOD], rejected=[ASK, BAD]), Judged([ASK], BOTH)),
    "text beside answers": (dict(prompt="2+2?", chosen=[GOOD], rejected=[BAD]), Judged([ASK], BOTH)),
    "answers that go on": (
        dict(chosen=[ASK, GOOD, ASK, GOOD], rejected=[ASK, GOOD, ASK, BAD], tools=[{"name": "add"}], score=3),
        Judged([ASK, GOOD, ASK], BOTH, tools=[{"name": "add"}]),
    ),
    "whole texts": (
        dict(chosen="\n\nHuman: 2+2?\n\nAssistant: four", rejected="\n\nHuman: 2+2?\n\nAssistant: five"),
        Judged("\n\nHuman: 2+2?\n\nAssistant:", (" four", " five")),
    ),
    "text and its answer": (dict(prompt="2+2?", completion="four", label=True), Judged([ASK], ([GOOD],), True)),
    "messages and their answer": (dict(prompt=[ASK], completion=[BAD], label=0), Judged([ASK], ([BAD],), False)),
    "conversation with a label": (dict(completion=[ASK, BAD], label=False), Judged([ASK], ([BAD],), False)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    record, expected = LAYOUTS[layout]
    assert judged(record) == expected


def test_plain_texts():
    assert judged(dict(prompt="2+2=", chosen="4", rejected="5"), plain=True) == Judged("2+2=", ("4", "5"))


def test_whole_texts_are_cut_between_words():
    """The answers begin with the space before their first word, which is one token with the word."""
    found = judged(dict(chosen="what? the forest", rejected="what? the fortress"))
    assert found == Judged("what? the", (" forest", " fortress"))
    assert judged(dict(chosen="yes", rejected="yet")) == Judged("", ("yes", "yet"))


@pytest.mark.parametrize(
    "record, message",
    [
        (["prompt"], "needs an object; it is a list"),
        (dict(messages=[ASK, GOOD]), 'needs the keys "chosen" and "rejected", or .* it has messages, and no completion'),
        (dict(prompt="2+2?", chosen="four"), "and no rejected"),
        (dict(prompt="2+2?", chosen="four", rejected=[BAD]), "must both be texts, or both lists of messages"),
        (dict(prompt="2+2?", chosen="four", rejected="four"), "are equal, so there is nothing to learn from"),
        (dict(prompt="2+2?", chosen=" ", rejected="four"), '"chosen" is an empty text'),
        (dict(prompt="2+2?", chosen=[], rejected="four"), '"chosen" must be a text or a list of messages'),
        (dict(prompt=[ASK], chosen=[dict(role="bot", content="x")], rejected=[BAD]), "message 0 has the role 'bot'"),
        (dict(prompt=[ASK], chosen=[ASK], rejected=[BAD]), "an answer has no message of the assistant"),
        (dict(prompt="2+2?", completion="four", label="good"), '"label" must be true or false'),
        (dict(completion="four", label=True), 'has "completion" but no "prompt"'),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(ValueError, match=message):
        judged(record)


def write(file, *records):
    file.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return file


def test_open_preferences(tmp_path):
    """Records are read by index, from several files, with a byte order mark and empty lines."""
    pair = LAYOUTS["strings"][0]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(pair).encode() + b"\n\n")
    write(tmp_path / "b.jsonl", LAYOUTS["conversations"][0])
    found = open_preferences(tmp_path)
    assert len(found) == 2 and found[0] == found[1] == Judged([ASK], BOTH)
    assert found.where(1) == f"{tmp_path / 'b.jsonl'}:1"
    single = open_preferences(tmp_path, of_pairs=False)
    assert len(single) == 4 and single[2] == Judged([ASK], ([GOOD],), True) and single[3] == Judged([ASK], ([BAD],), False)
    assert single.where(3) == f"{tmp_path / 'b.jsonl'}:1"


def test_bad_lines_are_named(tmp_path):
    pair, answer = LAYOUTS["strings"][0], LAYOUTS["text and its answer"][0]
    file = write(tmp_path / "a.jsonl", pair, "{", answer, dict(pair, chosen=1))
    with pytest.raises(ValueError) as error:
        open_preferences(file)
    for line, reason in ((2, "not JSON: Expecting"), (3, "has single answers"), (4, '"chosen" must be a text or a list')):
        assert f"{file}:{line}: {reason}" in str(error.value)
    with pytest.raises(ValueError, match="the loss needs pairs .* use loss kto, or other data"):
        open_preferences(write(tmp_path / "b.jsonl", answer))
    with pytest.raises(ValueError, match="no row with preferences"):
        open_preferences(write(tmp_path / "c.jsonl", ""))


def test_weights_are_refused(tmp_path):
    """All but 0 and 1."""
    for weight in (0, 1, 0.5):
        answers = dict(prompt=[ASK], chosen=[GOOD | {"weight": 1}], rejected=[BAD | {"weight": weight}])
        file = write(tmp_path / "a.jsonl", answers)
        if weight == 0.5:
            with pytest.raises(ValueError, match='a.jsonl:1: "rejected" has a message with another "weight" than 0 and 1'):
                open_preferences(file)
        else:
            assert len(open_preferences(file)) == 1


def test_files_of_fine_tuning(tmp_path):
    """JSON, tables and Parquet hold the same pairs, and labels of tables are words."""
    datasets = pytest.importorskip("datasets")
    pair, expected = LAYOUTS["strings"]
    (tmp_path / "a.json").write_text(json.dumps([pair], indent=1))
    (tmp_path / "b.csv").write_text('prompt,chosen,rejected\n2+2?,four,"five"\n')
    datasets.Dataset.from_list([pair | {"other": 1}]).to_parquet(tmp_path / "c.parquet")
    found = open_preferences(tmp_path)
    assert [found[i] for i in range(3)] == [expected] * 3 and found.where(2) == f"{tmp_path / 'c.parquet'} row 1"
    (tmp_path / "d.tsv").write_text("prompt\tcompletion\tlabel\n2+2?\tfour\tTrue\n2+2?\tfive\t0\n")
    answers = open_preferences(tmp_path / "d.tsv", of_pairs=False)
    assert [answers[i].desirable for i in range(2)] == [True, False]
    (tmp_path / "b.csv").write_text("prompt,chosen,rejected\n2+2?,four\n")
    with pytest.raises(ValueError, match="b.csv:2: has 2 fields, and the first line names 3"):
        open_preferences(tmp_path / "b.csv")
    with pytest.raises(ValueError, match="e.txt is no file of rows"):
        open_preferences(write(tmp_path / "e.txt", pair))


def test_equal_problems_are_one_clause(tmp_path):
    file = write(tmp_path / "a.jsonl", *[dict(messages=[ASK, GOOD])] * 12)
    with pytest.raises(ValueError, match=r"and no completion, label \(the same in all 12\)$"):
        open_preferences(file)


def test_a_changed_file_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", LAYOUTS["strings"][0])
    found = open_preferences(file)
    file.write_text("other")
    with pytest.raises(ValueError, match="a.jsonl:1 is not as it was when it was opened"):
        found[0]
