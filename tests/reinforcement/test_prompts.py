"""Prompts: rows with columns, their order in each epoch, and seeds by name."""

import json

import pytest

from moe_jax.reinforcement.prompts import KEYWORDS, open_prompts, prompt_at, prompt_tokens, prompts_within, seed_of
from tests.helpers import tiny

CHAT = [{"role": "user", "content": "2 + 3?"}]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_keep_their_columns(tmp_path):
    rows = [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": CHAT, "answer": 5, "level": {"hard": [True, None]}}]
    prompts = open_prompts(written(tmp_path / "a.jsonl", rows))
    assert len(prompts) == 2
    assert prompts[1] == rows[1]
    assert prompts[0] == rows[0] | {"level": None}, "functions find each column in each row"
    assert prompts.where(1) == f"{tmp_path}/a.jsonl:2"


def test_rows_of_verl_in_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    row = {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 3, "split": "train"},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row | {"ability": None}]), tmp_path / "train.parquet")
    prompts = open_prompts(tmp_path / "train.parquet")
    assert prompts[0] == row
    assert prompts[1] == row | {"ability": None}


@pytest.mark.parametrize(
    "row, error",
    [
        ({"question": "?"}, r'a.jsonl:2: needs the key "prompt"; it has question'),
        ({"prompt": ""}, '"prompt" is an empty text'),
        ({"prompt": 3}, "must be a text or a list of messages; got 3"),
        ({"prompt": []}, "must be a text or a list of messages"),
        ({"prompt": [{"role": "robot", "content": "?"}]}, "message 0 has the role 'robot'"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "5"}]}, "ends with the assistant's message"),
        *[({"prompt": "?", name: 1}, f'has the column "{name}", a keyword') for name in KEYWORDS],
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, row, error):
    with pytest.raises(ValueError, match=error):
        open_prompts(written(tmp_path / "a.jsonl", [{"prompt": "?"}, row]))


def test_a_folder_without_prompts(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_prompts(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no row with a prompt"):
        open_prompts(tmp_path)


def test_each_epoch_has_every_prompt_in_an_order_of_its_own(tmp_path):
    prompts = open_prompts(written(tmp_path / "a.jsonl", [{"prompt": "?", "id": i} for i in range(20)]))
    epochs = [[prompt_at(prompts, key, seed=3)["id"] for key in range(begin, begin + 20)] for begin in (0, 20)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]
    assert [prompt_at(prompts, key, seed=3)["id"] for key in (25, 4)] == [epochs[1][5], epochs[0][4]]
    assert [prompt_at(prompts, key, seed=None)["id"] for key in (0, 19, 20)] == [0, 19, 0]
    assert [prompt_at(prompts, key, seed=4)["id"] for key in range(20)] != epochs[0]


def test_long_prompts_are_left_out_and_counted(tmp_path):
    prompts = open_prompts(written(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (3, 9, 2, 8)]))
    kept = prompts_within(prompts, 3, lambda row: len(row["prompt"]))
    assert [kept[i]["prompt"] for i in range(len(kept))] == ["xxx", "xx"] and kept.left_out == 2
    assert prompts.left_out == 0
    with pytest.raises(ValueError, match=r"no prompt has at most 1 tokens: the shortest, .*a.jsonl:3, has 2"):
        prompts_within(prompts, 1, lambda row: len(row["prompt"]))


def test_a_refused_prompt_is_named_by_file_and_line(tmp_path):
    prompts = open_prompts(written(tmp_path / "a.jsonl", [{"prompt": CHAT}]))
    tokenizer = tiny.tokenizer(chat_template=None)
    with pytest.raises(ValueError, match="a.jsonl:1: a chat needs a tokenizer with a chat template"):
        prompts_within(prompts, 9, lambda row: len(prompt_tokens(tokenizer, row["prompt"])))


def test_tokens_of_texts_and_chats():
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(prompt_tokens(tokenizer, "1 + 1 =")) == "1 + 1 ="
    assert tokenizer.decode(prompt_tokens(tokenizer, CHAT)).endswith("<|im_start|>assistant\n")


def test_seeds_are_functions_of_names():
    names = [(run, step, key, attempt) for run in range(3) for step in range(5) for key in range(5) for attempt in range(2)]
    seeds = {seed_of(*each) for each in names}
    assert len(seeds) == len(names) and all(0 <= seed < 2**32 for seed in seeds)
    assert seed_of(0, 1, 2, 3) == 0x1BC33BF1, "old runs resume with the same seeds"
    assert seed_of(1, 11) != seed_of(11, 1)
