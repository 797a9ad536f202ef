"""Every example runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import load_adapter
from moe_jax.layers.lora import has_adapters
from tests.helpers import served, tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tiny.model(), tmp_path)


@pytest.fixture
def dense_checkpoint(tmp_path):
    """For examples that treat experts as all else: programs of a dense model compile soon."""
    return saved(tiny.dense(), tmp_path)


def saved(model, folder):
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(model, folder / "model", tokenizer_from=folder / "tokenizer")
    return folder / "model"


def test_every_example_has_a_test():
    stems = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = "clients convert distillation dpo finetune finetune_30b grpo lora_30b moe_block moe_block_sharded"
    assert stems == set(tested.split())


def test_finetune(checkpoint, tmp_path, capsys):
    example = load("finetune")
    data = tiny.write_texts(tmp_path / "texts")
    settings = dict(model=str(checkpoint), data=str(data), output=str(tmp_path / "out"), steps=3, batch_size=2, seq_len=16)
    example.main(example.Settings(**settings))
    assert "step 3: loss" in capsys.readouterr().out
    assert moe_jax.from_pretrained(tmp_path / "out", progress=False).config.num_experts == 4


@pytest.mark.thorough
def test_finetune_30b_with_the_recipe_on_a_small_checkpoint(checkpoint, tmp_path):
    example = load("finetune_30b")
    data = tiny.write_texts(tmp_path / "texts")
    settings = dict(model=str(checkpoint), data=str(data), output=str(tmp_path / "out"), steps=2, seq_len=16)
    example.main(example.Settings(**settings))
    assert moe_jax.from_pretrained(tmp_path / "out" / "model", progress=False).config.num_experts == 4
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_lora_30b_with_a_small_checkpoint(dense_checkpoint, tmp_path):
    example = load("lora_30b")
    data = tiny.write_texts(tmp_path / "texts")
    settings = dict(model=str(dense_checkpoint), data=str(data), output=str(tmp_path / "out"), steps=2, seq_len=16, rows=2)
    example.main(example.Settings(**settings))
    model = moe_jax.from_pretrained(tmp_path / "out", progress=False)
    assert has_adapters(model) and (tmp_path / "out" / "adapter" / "tokenizer.json").is_file()


def test_grpo(dense_checkpoint, tmp_path, capsys):
    example = load("grpo")
    sizes = dict(prompts=2, samples=2, max_new_tokens=4, steps=2)
    example.main(example.Settings(model=str(dense_checkpoint), output=str(tmp_path / "out"), **sizes))
    assert "step 2: reward 0.000, " in capsys.readouterr().out
    assert moe_jax.from_pretrained(tmp_path / "out", progress=False).config.num_hidden_layers == 2
    good = "\n    a = 1\n    b = a\n    return b"
    rewards = example.valid_python(["def f():"] * 3, [good, good, "\n    return 1"], ["stop", "length", "stop"])
    assert rewards == [1.0, 0.0, 0.0] and {"prompt": "def dedent(text):"} in example.first_lines()


def cells_of_the_notebook():
    notebook = json.loads((EXAMPLES / "finetune.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs():
    for cell in cells_of_the_notebook():
        assert cell["outputs"] == [] and cell["execution_count"] is None
        compile("".join(cell["source"]), "finetune.ipynb", "exec")


@pytest.mark.thorough
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """From data to an answer learned by heart, with the adapter separate and merged into the weights."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in cells_of_the_notebook():
        exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "What is frozen? -> All weights of the base model." in printed
    assert printed.splitlines()[-1] == "All weights of the base model."
    assert (tmp_path / "runs" / "notebook" / "run" / "report.html").is_file()


def test_distillation_brings_the_student_nearer_to_the_teacher(dense_checkpoint, tmp_path, capsys):
    example = load("distillation")
    moe_jax.save_pretrained(tiny.dense(rngs=nnx.Rngs(1)), tmp_path / "student", tokenizer_from=tmp_path / "tokenizer")
    data = tiny.write_texts(tmp_path / "texts")
    models = dict(teacher=str(dense_checkpoint), student=str(tmp_path / "student"), output=str(tmp_path / "out"))
    example.main(example.Settings(**models, data=str(data), steps=6, batch_size=2, seq_len=16, learning_rate=1e-2))
    steps = [line.split("distance ")[1] for line in capsys.readouterr().out.splitlines() if "distance" in line]
    assert len(steps) == 6 and all(float(distance) >= 0 for distance in steps)
    assert moe_jax.from_pretrained(tmp_path / "out", progress=False).config.model_type == "qwen3"


def test_dpo_prefers_the_chosen_answers(dense_checkpoint, tmp_path, capsys):
    example = load("dpo")
    pairs = [dict(prompt=f"ask {i}?", chosen="please", rejected="no") for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    places = dict(model=str(dense_checkpoint), data=str(tmp_path / "pairs.jsonl"), output=str(tmp_path / "out"))
    example.main(example.Settings(**places, steps=6, rank=4, batch_size=2, seq_len=128, learning_rate=2e-2))
    margins = [line.split("margin ")[1].split(",")[0] for line in capsys.readouterr().out.splitlines() if "margin" in line]
    assert len(margins) == 6 and float(margins[0]) == 0 and float(margins[-1]) > 0.05
    assert load_adapter(moe_jax.from_pretrained(dense_checkpoint, progress=False), tmp_path / "out").parameters > 0


def test_moe_block_learns():
    example = load("moe_block")
    assert example.main(example.Settings(steps=50)) > 0.75


@pytest.mark.thorough
def test_moe_block_sharded_has_the_losses_of_one_device():
    command = [sys.executable, str(EXAMPLES / "moe_block_sharded.py"), "--steps", "3"]
    one, eight = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert one.startswith("1 device(s): loss 1.") and eight == one.replace("1 device", "8 device", 1)


def test_convert(checkpoint, tmp_path, capsys):
    example = load("convert")
    example.main(example.Settings(source=str(checkpoint), target=str(tmp_path / "out"), dtype="float32"))
    assert "stages.0.mlp.experts.gate_up_proj (2, 4, 32, 16) float32" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_clients_pass_against_a_server():
    example = load("clients")
    with served.serve() as server:
        example.openai_text(example.Settings(url=server.url, model="tiny", max_tokens=4))
