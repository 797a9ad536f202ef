"""The demo, much shrunken, from text to generated code; its text and tokenizer; and the folders that it refuses."""

import ast
import contextlib
import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib.image
import numpy as np
import pytest
from flax import nnx
from transformers import AutoTokenizer
from transformers.utils import logging

from moe_jax.adapters import LoraSettings
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.cli import main
from moe_jax.demo.run import (
    CONTENTS,
    MARKER,
    DemoSettings,
    empty_output,
    is_python,
    logit_difference,
    num_statements,
    run_demo,
    small_config,
    transformers_logits,
)
from moe_jax.demo.text import (
    END_OF_TEXT,
    MAX_CHARACTERS,
    SPECIAL_TOKENS,
    TURN_END,
    as_chat,
    functions_of,
    library_functions,
    train_tokenizer,
)
from moe_jax.models.auto import from_config
from moe_jax.parallel.choices import MeshShape
from moe_jax.runtime.environment import program
from moe_jax.train.data import open_documents
from moe_jax.train.data.chat import chat_tokens
from moe_jax.train.metrics import read_records
from tests.helpers import shared_steps

SHRUNKEN = dict(steps=10, batch_size=2, seq_len=32, vocab_size=600, every_nth_file=60, samples=2, new_tokens=8, reward_steps=0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A finished run into a folder that holds the remains of an earlier one."""
    output = tmp_path_factory.mktemp("demo")
    (output / MARKER).touch()
    (output / "text.jsonl").write_text("")
    (output / "training").mkdir()
    (output / "training" / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n')
    (output / "model").mkdir()
    (output / "notes.txt").write_text("the user's own")
    return output, run(output, **SHRUNKEN)


def run(output, **options):
    """Returns the result of a demo whose two halves share a compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        shared_steps.share(patch)
        return run_demo(DemoSettings(output=str(output), **options))


def test_every_step_is_there_once_across_the_interruption(demo):
    output, result = demo
    metrics = [json.loads(line) for line in (output / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 11))
    assert [line["loss"] for line in metrics] == result.losses
    assert np.isfinite(result.losses).all() and result.losses[-1] < result.losses[0]


def test_the_folder_holds_exactly_the_listed_files(demo):
    output, _ = demo
    assert sorted(p.name for p in output.iterdir()) == sorted(
        [*(CONTENTS.keys() - {"adapter", "rewarded", "prompts.jsonl"}), MARKER, "notes.txt"]
    )
    for name in ("loss.png", "expert_load.png"):
        assert matplotlib.image.imread(output / name).std() > 0
    assert (output / "notes.txt").read_text() == "the user's own"


def test_the_export_has_the_logits_of_transformers(demo):
    """Training has changed every parameter of the initial model."""
    output, result = demo
    assert 0 <= result.logit_difference < 1e-4
    trained, initial = (nnx.state(from_pretrained(output / name), nnx.Param) for name in ("model", "initial"))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), trained, initial)
    assert all(jax.tree.leaves(changed))


def test_transformers_shows_no_progress_bar(demo, capsys):
    output, _ = demo
    assert logging.is_progress_bar_enabled()
    assert transformers_logits(output / "model", [5, 6]).shape == (2, 600)
    printed = capsys.readouterr()
    assert printed.out + printed.err == "" and logging.is_progress_bar_enabled()


def test_without_torch_and_with_rewards(tmp_path, monkeypatch, capsys, untrained):
    """The trained model is compared: equal weights have equal logits. Then it learns on the first lines of functions."""
    find_spec, seen = importlib.util.find_spec, []

    def grpo(settings, rewards):
        lines = [record["prompt"] for record in map(json.loads, Path(settings.data).read_text().splitlines())]
        assert len(lines) > 5 and all(line.startswith("def ") and line.endswith(":") for line in lines)
        bodies = ["\n    a = 1\n    return a\n", "\n    pass\n", "\n    a = 1\n    return a\n"]
        seen.append(rewards[0](lines[:3], bodies, ["stop", "stop", "length"]))
        return SimpleNamespace(model=untrained.model, metrics=[{"reward": 0.25}, {"reward": 0.75}])

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "torch" else find_spec(name, *more))
    monkeypatch.setattr("moe_jax.demo.run.grpo", grpo)
    result = run_demo(DemoSettings(output=str(tmp_path / "x"), **DENSE | {"reward_steps": 2}))
    assert (result.rewards, seen) == ([0.25, 0.75], [[1.0, 0.0, 0.0]])
    assert (tmp_path / "x" / "rewarded" / "model" / "config.json").is_file()
    printed = capsys.readouterr().out
    assert result.logit_difference == 0 and "The export computes the logits of the trained model, bit for bit." in printed
    assert f"not compared with transformers, which needs torch: {program('pip')} install torch" in printed
    other = from_config(small_config("qwen3", untrained.model.config.vocab_size, 0), rngs=nnx.Rngs(1))
    assert logit_difference(tmp_path / "x" / "model", [5, 6], other) > 0.1
    with pytest.raises(ValueError, match="on several devices .* needs torch: pip install torch"):
        run_demo(DemoSettings(output=str(tmp_path / "y"), mesh=MeshShape(fsdp=2), **SHRUNKEN))
    assert not (tmp_path / "y").exists()


DENSE = SHRUNKEN | {"steps": 2, "model": "qwen3", "prompt": "def "}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of a dense model with an adapter: its folder, its result, and the text that it printed."""
    output, printed = tmp_path_factory.mktemp("adapted"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = run(output, lora=LoraSettings(rank=4), **DENSE)
    return output, result, printed.getvalue()


def test_it_prints_each_stage_and_the_text(adapted):
    output, result, printed = adapted
    assert all(f"[{number}/8]" in printed for number in range(1, 9))
    assert len(result.texts) == 2 and all(text.startswith("def ") for text in result.texts)
    assert f"{sum(map(is_python, result.texts))} of 2 are valid Python" in printed
    assert "expert_load" not in printed.split("The files:")[1].replace("expert_load.jsonl", "")
    verdict, _, first, *_ = printed.splitlines()[-6:]
    assert verdict.startswith("The export computes the logits of transformers, up to ") and first.startswith("Try next")
    commands = [shlex.split(line) for line in printed.split("Try next")[1].splitlines()[1:]]
    assert [command[:2] for command in commands] == [[program(), name] for name in ("generate", "finetune", "generate")]
    assert str(output / "model") in commands[0] and f"{output}-chat/model" in commands[2]


def test_an_adapter(adapted):
    """Matrices without an adapter stay as they were, and transformers reads the merged model."""
    output, _, _ = adapted
    merged, initial = (nnx.state(from_pretrained(output / name), nnx.Param) for name in ("model", "initial"))
    changed = {
        jax.tree_util.keystr(path): bool((a != b).any())
        for (path, a), b in zip(jax.tree.leaves_with_path(merged), jax.tree.leaves(initial), strict=True)
    }
    assert all(is_changed == ("proj" in name) for name, is_changed in changed.items()) and len(changed) > 8
    assert (output / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "body, number",
    [
        ("return a", 1),
        ("pass\n    pass", 0),
        ("'text'\n    # comment\n    return 3", 1),
        ("a = 1\n    a = 1", 1),
        ("a = 1\n    return a", 2),
        ("return a\nf(1)", 0),
        ("return (", 0),
    ],
)
def test_statements_that_a_reward_counts(body, number):
    assert num_statements(f"def f(a):\n    {body}\n") == number


@pytest.mark.thorough
def test_a_pipe_on_imitated_devices(tmp_path):
    """`moe-jax demo --mesh.pipe 2` trains as one device does, exports, and completes with the export."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in DENSE.items()]
    pipe = ["--mesh.pipe", "2", "--gradient-accumulation", "2", "--output", str(tmp_path / "piped")]
    done = subprocess.run(
        [sys.executable, "-m", "moe_jax.cli", "demo", *pipe, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 devices, a pipe of 2 ranks with 1 chunk of 2 layers (1 of 4 places are empty)" in done.stdout
    assert "generation does not run through a pipe yet: the export is loaded onto one device and writes" in done.stdout
    piped = [record["loss"] for record in read_records(tmp_path / "piped" / "training" / "metrics.jsonl")]
    np.testing.assert_allclose(piped, run(tmp_path / "dense", **DENSE).losses, rtol=1e-5)


def test_a_model_that_no_pipe_takes_is_refused(tmp_path):
    settings = DemoSettings(output=str(tmp_path / "x"), mesh=MeshShape(pipe=2), pipe_chunks=9, steps=1)
    with pytest.raises(ValueError, match="steps must be at least 2.* layers do not reach the last of 9 chunks on pipe=2"):
        run_demo(settings)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def untrained(monkeypatch):
    """The result of a run whose end is its beginning."""
    result = SimpleNamespace(metrics=[{"step": 1, "loss": 1.0}])

    def finetune(settings, **_):
        result.model = from_pretrained(settings.model, dtype="float32")
        return result

    monkeypatch.setattr("moe_jax.demo.run.finetune", finetune)
    monkeypatch.setattr("moe_jax.demo.run.plot_run", lambda *_, **__: None)
    return result


def test_logits_that_disagree_end_the_demo_and_its_program(tmp_path, monkeypatch, capsys, untrained):
    monkeypatch.setattr("moe_jax.demo.run.logit_difference", lambda *_: float("nan"))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (SHRUNKEN | {"steps": 2}).items()]
    with pytest.raises(SystemExit) as status:
        main(["demo", "--model", "qwen3", f"--output={tmp_path / 'x'}", *options])
    assert status.value.code == 2 and "the logits of transformers differ by nan" in capsys.readouterr().err


def test_the_model_says_how_it_generates_and_chats(demo):
    output, _ = demo
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    settings = json.loads((output / "model" / "generation_config.json").read_text())
    assert settings["do_sample"] and 0 < settings["temperature"] < 1 and 0 < settings["top_p"] < 1
    assert tokenizer.convert_ids_to_tokens(settings["eos_token_id"]) == [END_OF_TEXT, TURN_END]
    conversations = open_documents(output / "chats.jsonl")
    assert conversations.format == "chat"
    messages = conversations[0]["messages"]
    tokens, learned = chat_tokens(tokenizer, messages)
    assert tokenizer.decode(tokens[learned]) == messages[1]["content"] + TURN_END
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens).startswith(asked)


def test_the_tokenizer_round_trips_every_text(tmp_path):
    """transformers loads it, with the special tokens as ids 0 to 2."""
    texts = library_functions(30)
    train_tokenizer(texts, 500).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 500 and tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2]
    for text in [*texts[:3], "naïve\t\r\n  数 🙂", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_text_is_short_functions_without_repeats():
    """Every call returns them in the same order."""
    functions = library_functions(30)
    assert functions == library_functions(30) and len(functions) == len(set(functions))
    assert all(len(text) <= MAX_CHARACTERS for text in functions)
    parsed = [ast.parse(text).body for text in functions]
    assert all(len(body) == 1 and isinstance(body[0], ast.FunctionDef) for body in parsed)


def test_functions_lose_docstrings_and_methods_their_class():
    """Functions that are too short or too long, and files that do not parse, are left out."""
    method = 'class A:\n    def f(self, a):\n        """Doc."""  # comment\n        b = a\n        return b\n'
    assert functions_of(method) == ["def f(self, a):\n    b = a\n    return b\n"]
    assert functions_of("def short():\n    return 1\n") == []
    assert functions_of(f"def long():\n    a = {'x' * MAX_CHARACTERS}\n    return a\n") == []
    assert functions_of("@a\n@b\n@c\ndef documented_alone():\n    'Doc.'\n") == []
    assert functions_of("print 'Python 2'\n") == [] and functions_of("") == []


def test_a_chat_asks_for_a_function_by_its_signature():
    chat = as_chat("def f(self, a=1):\n    b = a\n    return b\n")
    assert [message["content"] for message in chat["messages"]] == [
        "Write f(self, a=1).",
        "def f(self, a=1):\n    b = a\n    return b",
    ]


def test_the_model_has_about_three_million_parameters():
    for kind in ("qwen3_moe", "deepseek_v3", "qwen3"):
        model = nnx.eval_shape(lambda kind=kind: from_config(small_config(kind, 1024, 0), rngs=nnx.Rngs(0)))
        sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
        assert kind == "qwen3" or 2.5e6 < sum(sizes) < 3.5e6


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "text.jsonl").write_text("the user's own")
    with pytest.raises(FileExistsError, match="is no earlier demo's output"):
        empty_output(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "text.jsonl"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        empty_output(tmp_path / "file")


def test_an_earlier_demo_stays_where_options_are_wrong(tmp_path):
    for name in (MARKER, "text.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as error:
        run_demo(
            DemoSettings(
                output=str(tmp_path),
                steps=1,
                every_nth_file=0,
                samples=0,
                new_tokens=0,
                reward_steps=-1,
                vocab_size=258,
                prompt="",
                batch_size=0,
            )
        )
    for part in (
        "steps must be at least 2, so that the run can be interrupted; got 1",
        "every_nth_file must be at least 1; got 0",
        "samples must be at least 1; got 0",
        "new_tokens must be at least 1",
        "reward_steps must be at least 0; got -1",
        "vocab_size must be at least 259: all bytes, and the special tokens; got 258",
        "prompt must not be empty",
        "batch_size=0 must be an integer of at least 1",
    ):
        assert part in str(error.value)
    assert (tmp_path / "text.jsonl").exists()
