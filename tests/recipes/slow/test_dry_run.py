"""A dry run shows what would be learned, refuses what the run would refuse, and leaves nothing behind."""

import json

import pytest

from moe_jax.recipes import dry_run, finetune
from tests.helpers import tiny
from tests.helpers.tiny import settings

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "bye"},
]


def chat_settings(folder, **changes):
    (folder / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 2)
    return settings(folder, data=str(folder / "chats.jsonl"), seq_len=256, dry_run=True, **changes)


def test_the_row_that_is_shown_marks_what_is_learned(tmp_path, capsys):
    dry_run(chat_settings(tmp_path), model=tiny.dense(), tokenizer=tiny.tokenizer())
    printed = capsys.readouterr().out
    assert "2 conversations: 124 tokens, 21% of them learned; rows of 256 tokens" in printed
    assert "steps 1 to 30, 4 x 256 tokens a step on 1 device: " in printed
    assert "WARNING: each document would be learned 2" in printed and "3 epochs are 1 step\n" in printed
    assert (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[hi there<|im_end|>]]\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n[[bye<|im_end|>]]\n"
    ) in printed
    assert "segment 2: 62 tokens, 13 learned, of " in printed and f"{tmp_path}/chats.jsonl:1" in printed
    assert not (tmp_path / "run").exists()


def test_of_a_finished_run_nothing_is_left(tmp_path, capsys, steps_that_learn_nothing):
    finetune(settings(tmp_path, steps=1, warmup_steps=0), model=tiny.dense(), tokenizer=tiny.tokenizer())
    dry_run(settings(tmp_path, steps=1, warmup_steps=0, dry_run=True), model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert "all 1 steps are taken: nothing is left to do" in capsys.readouterr().out


def test_it_refuses_another_run_and_finetune_refuses_to_pretend(tmp_path, steps_that_learn_nothing):
    finetune(settings(tmp_path, steps=1, warmup_steps=0), model=tiny.dense(), tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="holds another run.*seed: checkpoint 0, now 1"):
        dry_run(settings(tmp_path, seed=1, dry_run=True), model=tiny.dense(), tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="call moe_jax.recipes.dry_run"):
        finetune(settings(tmp_path, dry_run=True), model=tiny.dense(), tokenizer=tiny.tokenizer())
