"""`moe-jax bench` on a small model."""

import json

import pytest

from moe_jax.cli import main
from moe_jax.config import config_to_dict
from tests.helpers import tiny

SMALLEST = "--max-sequences 1 --max-tokens-per-step 16 --max-length 64 --num-pages 4 --dtype float32".split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(tiny.dense().config)))
    return tmp_path


@pytest.mark.long
def test_a_table_and_a_picture(folder, capsys):
    picture = folder / "pictures" / "bench.png"
    load = "--lazy --concurrency 1 2 --requests-each 2 --prompt-tokens 8 --new-tokens 4".split()
    main(["bench", "--random-weights", str(folder), *SMALLEST, *load, "--plot", str(picture)])
    title, header, *rows, wrote = capsys.readouterr().out.splitlines()
    assert "with random weights, float32, cpu, prompts of 8 tokens, 4 new tokens; ready in" in title
    assert header.split()[:3] == ["clients", "requests", "tokens/s"]
    found = [row.replace(" ms", "").split() for row in rows]
    assert [row[:2] for row in found] == [["1", "2"], ["2", "4"]] and {len(row) for row in found} == {7}
    assert all(float(number) > 0 for row in found for number in row)
    assert wrote == f"wrote {picture}" and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "give either a checkpoint's path or --random-weights CONFIG"),
        ("{0} --random-weights {0}", "give either a checkpoint's path or --random-weights CONFIG"),
        ("--random-weights qwen4", "no config 'qwen4'; give a folder with a config.json, a hub id, or one of qwen3-0.6b"),
        ("--random-weights {} --plot bench.pdf", "the picture's name must end in .png; got bench.pdf"),
        ("--random-weights {} --new-tokens 1", "new_tokens must be at least 2; got 1"),
        ("--random-weights {} --concurrency 4 0", "clients must be at least 1; got 0"),
        (
            "--random-weights {} --max-length 64",
            "a prompt of 512 tokens and the first token of its answer exceed the engine's max_length=64",
        ),
        ("--random-weights {} --num-pages 1", "num_pages must be at least 2"),
        ("--random-weights {} --max-sequences 0", "max_sequences must be an integer, at least 1; got 0"),
        ("--random-weights {} --output-len 4", "bench has no --output-len; did you mean --new-tokens?"),
    ],
)
def test_wrong_options_are_named_before_weights_are_made(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("moe_jax.serving.measurements.random_engine", None)
    with pytest.raises(SystemExit):
        main(["bench", *arguments.format(folder).split()])
    assert message in capsys.readouterr().err
