"""The journal: groups come back with their bits, also after a kill at any byte."""

import json
import os
from dataclasses import fields

import numpy as np
import pytest

from moe_jax.reinforcement.journal import Journal
from moe_jax.reinforcement.samples import Group, Sample


def made(rng, key, samples=2, length=3):
    return Group(
        key=key,
        row={"prompt": [{"role": "user", "content": "ä \n?"}], "answer": 4, "level": None},
        prompt_tokens=rng.integers(0, 99, 4, dtype=np.int32),
        samples=tuple(
            Sample(
                seed=int(rng.integers(2**32)),
                tokens=rng.integers(0, 99, length, dtype=np.int32),
                log_probs=rng.normal(size=length).astype(np.float32),
                own=rng.random(length) < 0.5,
                finish_reason="stop",
                text="1\r\n\u2028 {}",
                weights_version=3,
                turns=[{"role": "assistant", "content": "x"}],
                reward=0.1,
            )
            for _ in range(samples)
        ),
        rewards=np.array([[rng.normal(), np.nan]] * samples),
        extras={"note": ["a", np.float32(0.5)]},
        metrics={"speed": 1.5},
    )


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Group | Sample):
        return all(same(getattr(a, each.name), getattr(b, each.name)) for each in fields(a))
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, tuple) else a == b


def test_groups_come_back_with_their_bits(rng, tmp_path):
    groups = {key: made(rng, key) for key in (5, 3, 12)}
    journal = Journal(tmp_path / "journal")
    assert journal.groups(7) == {}
    for group in groups.values():
        journal.append(7, group)
    journal.append(8, made(rng, 20))
    found = Journal(tmp_path / "journal").groups(7)
    assert list(found) == [5, 3, 12]
    assert all(same(group, groups[key]) for key, group in found.items())
    assert found[5].samples[0].tokens.flags.writeable


def test_experts_are_not_stored(rng, tmp_path):
    from dataclasses import replace

    group = made(rng, 1, samples=1)
    experts = replace(group.samples[0], expert_ids=np.zeros((7, 2, 2), np.uint8))
    Journal(tmp_path).append(0, replace(group, samples=(experts,)))
    assert same(Journal(tmp_path).groups(0)[1], group)


def test_a_cut_at_every_byte_leaves_a_prefix_of_whole_groups(rng, tmp_path):
    groups = [made(rng, key, samples=1, length=2) for key in range(3)]
    journal = Journal(tmp_path / "whole")
    for group in groups:
        journal.append(0, group)
    whole = (tmp_path / "whole" / "00000000" / "groups.jsonl").read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])
    file = tmp_path / "cut" / "00000000" / "groups.jsonl"
    file.parent.mkdir(parents=True)
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        found = Journal(tmp_path / "cut").groups(0)
        assert list(found) == list(range(int((ends <= size).sum())))
    assert all(same(found[key], group) for key, group in enumerate(groups))


def test_a_group_after_a_torn_line_is_not_lost(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    groups = [made(rng, key, samples=1, length=1) for key in range(2)]
    journal = Journal(tmp_path)
    for group in groups:
        journal.append(4, group)
    file = tmp_path / "00000004" / "groups.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        file.write_bytes(whole[:size])
        Journal(tmp_path).append(4, groups[1])
        assert file.read_bytes() == whole


def test_a_group_after_a_full_disk_is_not_lost(rng, tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append(0, made(rng, 0))

    def full(handle):
        os.truncate(handle, os.stat(handle).st_size - 5)
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(os, "fsync", full)
        journal.append(0, made(rng, 1))
    journal.append(0, made(rng, 2))
    assert list(Journal(tmp_path).groups(0)) == [0, 2]


@pytest.mark.parametrize("where", [0, 40, -2])
def test_a_damaged_line_in_the_middle_is_named(rng, tmp_path, where):
    journal = Journal(tmp_path)
    for key in range(3):
        journal.append(0, made(rng, key))
    file = tmp_path / "00000000" / "groups.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = bytearray(lines[1])
    damaged[where] ^= 1
    file.write_bytes(lines[0] + bytes(damaged) + lines[2])
    with pytest.raises(ValueError, match=r"00000000/groups.jsonl:2 is damaged"):
        Journal(tmp_path).groups(0)
    with pytest.raises(ValueError, match="is damaged"):
        Journal(tmp_path).append(0, made(rng, 9))


def test_lines_are_text_that_other_programs_can_read(rng, tmp_path):
    Journal(tmp_path).append(0, made(rng, 6))
    checksum, _, content = (tmp_path / "00000000" / "groups.jsonl").read_text().partition(" ")
    assert len(checksum) == 32 and json.loads(content)["key"] == 6


def test_old_steps_are_dropped(rng, tmp_path):
    journal = Journal(tmp_path)
    for step in (1, 2, 30):
        journal.append(step, made(rng, step))
    journal.drop(before=2)
    assert [sorted(journal.groups(step)) for step in (1, 2, 30)] == [[], [2], [30]]
    Journal(tmp_path / "none").drop(before=5)
