"""The program runs each command, teaches with --help, and answers bad input with one line and status 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_jax
from moe_jax import cli
from moe_jax.cli import BY_NAME, main
from moe_jax.commands.check import CheckCommand
from moe_jax.commands.generate import GenerateCommand
from moe_jax.commands.other_names import with_draft_source
from moe_jax.commands.plan import PlanCommand
from moe_jax.commands.serve import ServeCommand
from moe_jax.generation import Drafts
from moe_jax.runtime import processes
from moe_jax.runtime.environment import program
from tests.helpers import steps_without_passes, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), folder / "model", tokenizer_from=folder / "tokenizer")
    return folder / "model"


def fails(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as status:
        main(list(arguments))
    assert status.value.code == 2
    return capsys.readouterr().err


def test_convert_to_orbax_and_back_keeps_every_bit(checkpoint, tmp_path, capsys):
    main(["convert", str(checkpoint), str(tmp_path / "orbax")])
    assert f"this is an Orbax checkpoint: `{program()} convert" in fails(capsys, "check", str(tmp_path / "orbax"))
    main(["convert", str(tmp_path / "orbax"), str(tmp_path / "hf"), "--to", "hf"])
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'hf'} in float32"
    for file in checkpoint.iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_convert_says_what_it_rounds_and_replaces(checkpoint, tmp_path, capsys):
    for _ in range(2):
        main(["convert", str(checkpoint), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"wrote {tmp_path / 'hf'} in bfloat16, rounded from float32"
    assert second == f"{first}; the checkpoint that was there is replaced"


def test_finetune_then_generate(checkpoint, tmp_path, capsys, monkeypatch):
    """A dense model goes all the way, because its programs compile soon; its steps learn nothing."""
    steps_without_passes.put_in_place(monkeypatch, steps_without_passes.learn_nothing)
    data, output = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "without-tokenizer")
    options = "--seq-len 16 --batch-size 2 --steps 3 --dtype float32".split()
    model = ["--model", str(tmp_path / "without-tokenizer"), "--tokenizer", str(checkpoint)]
    main(["finetune", *model, "--data", str(data), "--output", str(output), *options])
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 3
    main(["plot", str(output), "--step", "2"])
    assert {picture.name for picture in output.glob("*.png")} == {"loss.png"}
    generate = ["generate", str(output / "model"), "--prompt", "text", "--max-new-tokens", "5", "--dtype", "float32"]
    main(generate)
    assert "text" in capsys.readouterr().out
    main([*generate, "--chat"])
    assert "text" not in capsys.readouterr().out
    (output / "model" / "chat_template.jinja").unlink()
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    assert "a chat needs a tokenizer with a chat template" in fails(capsys, *generate, "--chat")


def test_generate_with_drafts_prints_its_acceptance(checkpoint, tmp_path, capsys, monkeypatch):
    """Bad options, and a model without a module for drafts, are refused before weights are read."""
    moe_jax.save_pretrained(tiny.deepseek(mtp=1), tmp_path, tokenizer_from=checkpoint)
    options = "--prompt text --max-new-tokens 3 --temperature 0.7 --top-k 20 --top-p 0.9 --dtype float32 --drafts".split()
    given = []

    def drafted(model, prompt, **options):
        given.append(options)
        return [8, 9], Drafts(3, 1)

    with monkeypatch.context() as patch:
        patch.setattr("moe_jax.generation.generate_with_drafts", drafted)
        main(["generate", str(tmp_path), *options])
    printed = capsys.readouterr()
    assert "text" in printed.out and "1 of 3 drafts were accepted (33%)" in printed.err
    assert (given[0]["temperature"], given[0]["top_k"], given[0]["top_p"]) == (0.7, 20, 0.9)
    # Before weights are read.
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    assert "top_p must be a number in (0, 1]; got 2.0" in fails(capsys, "generate", str(tmp_path), *options, "--top-p", "2")
    assert "drafts need a model loaded with its MTP modules" in fails(capsys, "generate", str(checkpoint), *options)


def test_a_prompt_begins_with_one_bos_token(tmp_path, monkeypatch):
    """A plain prompt begins as its tokenizer begins a text. After a chat template nothing is added."""
    tiny.tokenizer_with_a_beginning().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    prompts = []
    monkeypatch.setattr("moe_jax.generation.generate", lambda model, prompt, **options: prompts.append(prompt) or [])
    for chat in ([], ["--chat"]):
        main(["generate", str(tmp_path / "model"), "--prompt", "a", *chat])
    (begin, a), (first, second, *_) = prompts
    assert begin == first == 1 and 1 not in (a, second)


def test_check_prints_the_report_and_writes_it(checkpoint, tmp_path, capsys):
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=checkpoint)
    # The prompt has the length of those in tests/check: both run the same compiled programs.
    options = ["--prompt", "ab", "--dtype", "float32", "--repeats", "1", "--json", str(tmp_path / "report.json")]
    main(["check", str(tmp_path / "model"), *options])
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert f"Token ID: {report['next_token_id']}" in printed and "Total gradient norm" in printed


@pytest.mark.parametrize(
    "command, sees_one_gpu",
    [
        ("check --random-config qwen3-0.6b", True),
        ("check --random-config qwen3-0.6b --devices 1", True),
        ("check --random-config qwen3-0.6b --devices 2", False),
        ("generate model --prompt x", True),
        ("generate model --prompt x --devices 2", False),
        ("plan qwen3-0.6b --devices 8", True),
        ("serve model", True),
        ("serve model --devices 2", False),
        ("serve model --replicas 2", False),
    ],
)
def test_gpus_that_a_command_does_not_take_are_hidden_from_it(command, sees_one_gpu, monkeypatch):
    hidden = []
    monkeypatch.setattr(processes, "use_one_gpu", lambda: hidden.append(True))
    for kind in (CheckCommand, GenerateCommand, PlanCommand, ServeCommand):
        monkeypatch.setattr(kind, "run", lambda self: None)
    main(command.split())
    assert bool(hidden) == sees_one_gpu


@pytest.mark.thorough
def test_check_runs_in_several_processes(checkpoint, tmp_path, capfd):
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=checkpoint)
    check = ["check", str(tmp_path / "model"), "--prompt", "the same words", "--dtype", "float32", "--repeats", "1", "--json"]
    main([*check, str(tmp_path / "alone.json")])
    program = [sys.executable, "-m", "moe_jax.cli", *check, str(tmp_path / "launched.json")]
    main(["launch", "--processes", "2", "--cpu-devices", "1", "--", *program])
    assert "[0] 2 x cpu, float32, 14 tokens" in capfd.readouterr().out
    alone, launched = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "launched"))
    assert launched["next_token_id"] == alone["next_token_id"]
    for name in ("logprob", "loss", "gradient_norm", "max_gradient", "min_gradient"):
        np.testing.assert_allclose(launched[name], alone[name], rtol=1e-4)


def test_help_lists_commands_and_shows_examples(capsys):
    main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in BY_NAME) and len(printed.splitlines()) <= 27
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert "moe-jax check --random-config qwen3-30b-a3b" in capsys.readouterr().out


def test_help_does_not_import_jax():
    """JAX takes seconds to import."""
    program = (
        "import sys; from moe_jax.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main(command.split())\n"
        "    except SystemExit: pass\n"
        "    assert 'jax' not in sys.modules, command"
    )
    commands = ["--help", "--version", *(f"{name} --help" for name in BY_NAME if name != "demo")]
    subprocess.run([sys.executable, "-c", program, *commands], check=True, stdout=subprocess.DEVNULL)


def test_every_command_has_its_class():
    parts = Path(cli.__file__).parent / "commands"
    others = {"__init__", "config_file", "groups", "loading", "options", "other_names"}
    assert {path.stem for path in parts.glob("*.py")} == others | BY_NAME.keys()
    for name in BY_NAME:
        assert callable(cli._command_class(name).run)


def test_completion_knows_the_commands(capsys):
    with pytest.raises(SystemExit) as status:
        main(["--tyro-print-completion", "bash"])
    assert not status.value.code and "finetune" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, meant",
    [
        ("finetun --model x", "no command 'finetun'; did you mean finetune?"),
        ("--verbose", "no command '--verbose'; moe-jax --help lists them"),
        ("", "no command given; moe-jax --help lists them"),
        ("finetune --lr 1e-4", "finetune has no --lr; did you mean --learning-rate?"),
        ("finetune --per_device_train_batch_size=4", "no --per_device_train_batch_size; did you mean --batch-size"),
        ("finetune --skip-bad-data", "finetune has no --skip-bad-data; did you mean --skip-bad-documents?"),
        ("finetune --lora_r 16", "finetune has no --lora_r; did you mean --lora.rank?"),
        ("plan qwen3-30b-a3b --devices 1 --lora-rank 32", "plan has no --lora-rank; did you mean --lora.rank?"),
        ("plan qwen3-30b-a3b --devices 1 --base fp8", "plan has no --base; did you mean --weights?"),
        ("prefer --beta 0.1", "prefer has no --beta; did you mean --preference.beta?"),
        ("generate m --prompt x --max-tokens 3", "generate has no --max-tokens; did you mean --max-new-tokens?"),
    ],
)
def test_a_name_that_is_nearly_right_is_corrected(arguments, meant, capsys):
    assert meant in fails(capsys, *arguments.split())


def test_a_closed_pipe_ends_silently():
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "moe_jax.cli", "--help"]
    ended = subprocess.run(program, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_launch_ends_with_the_status_of_what_it_started(capsys):
    command = [sys.executable, "-c", "import sys; print('started', *sys.argv[1:]); sys.exit(5)", "--steps", "3"]
    with pytest.raises(SystemExit) as status:
        main(["launch", "--processes", "1", "--cpu-devices", "1", "--", *command])
    assert status.value.code == 5 and "[0] started --steps 3" in capsys.readouterr().out
    assert "processes=0 must be at least 1" in fails(capsys, "launch", "--processes", "0", "--cpu-devices", "1", "--", "x")
    assert "'no-such-program'" in fails(capsys, "launch", "--processes", "1", "--cpu-devices", "1", "--", "no-such-program")


@pytest.mark.parametrize("options", ["--repeats 0", "--devices 0", "--devices 999", "--json /no/such/folder/report.json"])
def test_bad_options_are_found_before_a_model_is_downloaded(options, monkeypatch, capsys):
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.downloaded", None)
    commands = ["check org/model"] + ["generate org/model --prompt x"] * ("devices" in options)
    for command in commands:
        assert options.split()[0].strip("-") in fails(capsys, *command.split(), *options.split())


@pytest.mark.parametrize("said, line", [("saved at step 3", "saved at step 3"), ("", "interrupted")])
def test_ctrl_c_is_one_line(said, line, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt(*filter(None, [said]))

    monkeypatch.setattr("moe_jax.cli._run", interrupted)
    with pytest.raises(SystemExit) as status:
        main(["finetune"])
    assert status.value.code == 130 and capsys.readouterr().err == f"moe-jax: {line}\n"


def test_bad_input_is_one_line_and_status_two(checkpoint, tmp_path, capsys):
    assert "give either a checkpoint's path or --random-config" in fails(capsys, "check")
    check = ("check", "--random-config", "qwen3-30b-a3b")
    for option in ("--tokens", "--layers"):
        assert f"{option} goes with --random-config" in fails(capsys, "check", str(tmp_path), option, "7")
    assert "is a folder; give a file" in fails(capsys, *check, "--json", str(tmp_path))
    assert "num_tokens must be at least 1; got 0" in fails(capsys, *check, "--tokens", "0")
    assert "repeats must be at least 1; got 0" in fails(capsys, *check, "--repeats", "0")
    assert "num_hidden_layers=0 must be a positive integer" in fails(capsys, *check, "--layers", "0")
    assert "no config 'gpt'; there are: qwen3-0.6b" in fails(capsys, "check", "--random-config", "gpt")
    (tmp_path / "empty").mkdir()
    assert "give the output folder of a training run" in fails(capsys, "plot", str(tmp_path / "empty"))
    error = fails(capsys, "generate", str(tmp_path / "empty"), "--prompt", "x")
    assert "config.json" in error and "Traceback" not in error
    assert "top_k must be an integer, at least 1" in fails(capsys, "generate", str(checkpoint), "--prompt", "x", "--top-k", "0")


def test_drafts_without_a_source_are_the_modules():
    """The option was a flag, which the model's name may follow. No arguments are an option's absence."""
    for given, completed in (
        ("", ""),
        ("model --drafts", "model --drafts module"),
        ("--drafts model", "--drafts module model"),
        ("--drafts lookup:3 model", "--drafts lookup:3 model"),
        ("model --drafts=lookup:3 --no-drafts", "model --drafts=lookup:3"),
    ):
        assert with_draft_source(given.split()) == completed.split()
