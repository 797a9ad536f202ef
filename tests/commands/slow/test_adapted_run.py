"""A run of adapters from the command line: trained, read, served from, written alone and merged."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.adapters import merge_adapter
from moe_jax.cli import main
from tests.helpers import tiny
from tests.helpers.adapted_models import logits_of

TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a run with a chat template of its own; its base is next to it."""
    folder = tmp_path_factory.mktemp("lora")
    tiny.tokenizer(chat_template=None).save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), folder / "base", tokenizer_from=folder / "tokenizer")
    paths = ["--model", folder / "base", "--data", tiny.write_texts(folder / "texts"), "--output", folder / "run"]
    options = "--lora.rank 4 --lora.ranks q_proj 3 --steps 2 --learning-rate 5e-2 --warmup-steps 0 --checkpoint-every 1"
    options += " --seq-len 32 --batch-size 4 --dtype float32 --chat-template chatml"
    main(["finetune", *map(str, paths), *options.split()])
    return folder / "run"


@pytest.fixture(scope="module")
def logits(run):
    return np.asarray(logits_of(moe_jax.from_pretrained(run, dtype=jnp.float32), TOKENS))


def near(model, logits, tolerance=1e-5) -> bool:
    return np.allclose(logits_of(model, TOKENS), logits, rtol=tolerance, atol=tolerance)


def test_the_folder_gets_the_adapter(run, logits):
    names = {file.name for file in (run / "adapter").iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"}
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run.parent / "base")
    assert config["rank_pattern"] == {"q_proj": 3, "k_proj": 4, "v_proj": 4, "o_proj": 4} and config["r"] == 2
    assert not (run / "model").exists()
    base = moe_jax.from_pretrained(run.parent / "base", dtype=jnp.float32)
    assert not near(base, logits, 1e-3)
    assert near(moe_jax.from_pretrained(run.parent / "base", adapter=run / "adapter", dtype=jnp.float32), logits)


@pytest.mark.parametrize("to", ["hf", pytest.param("orbax", marks=pytest.mark.thorough)])
def test_merging(run, logits, tmp_path, capsys, to):
    main(["convert", str(run), str(tmp_path / "merged"), "--merge", *(["--to", to] if to == "orbax" else [])])
    load = moe_jax.checkpoint.load_orbax if to == "orbax" else moe_jax.from_pretrained
    assert near(load(tmp_path / "merged", dtype=jnp.float32), logits)
    if to == "hf":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        with torch.no_grad():
            found = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
        np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    # 2 layers: 4 projections of attention, and 3 of each of 4 experts.
    assert "compared with base + adapter: 32 matrices are changed" in capsys.readouterr().out
    assert "im_start" in (tmp_path / "merged" / "chat_template.jinja").read_text()


def test_a_merge_that_lost_an_expert_is_refused(run, tmp_path, monkeypatch, capsys):
    def forgetful(model):
        down = model.stages[0].mlp.experts.down_lora
        down.b[...] = down.b[...].at[1, 3].set(0)
        merge_adapter(model)

    monkeypatch.setattr("moe_jax.adapters.merge.merge_adapter", forgetful)
    with pytest.raises(SystemExit):
        main(["convert", str(run), str(tmp_path / "merged"), "--merge"])
    assert "model.layers.1.mlp.experts.3.down_proj.weight: the merged checkpoint differs from base" in capsys.readouterr().err


def test_an_adapter_of_an_earlier_step_needs_no_base(run, logits, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    for step in ("1", "2"):
        main(["convert", str(run), str(tmp_path / step), "--to", "adapter", "--step", step])
    monkeypatch.undo()
    assert not near(moe_jax.from_pretrained(tmp_path / "1", dtype=jnp.float32), logits)
    assert near(moe_jax.from_pretrained(tmp_path / "2", dtype=jnp.float32), logits)
    assert (tmp_path / "2" / "adapter_model.safetensors").read_bytes() == (
        run / "adapter" / "adapter_model.safetensors"
    ).read_bytes()


def test_the_way_must_be_said(run, tmp_path, capsys):
    for options in ([], ["--to", "hf"], ["--merge", "--to", "adapter"]):
        with pytest.raises(SystemExit):
            main(["convert", str(run), str(tmp_path / "out"), *options])
        assert "trained an adapter: give either --to adapter" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", str(run.parent / "base"), str(tmp_path / "out"), "--merge"])
    assert "--merge and --base are for the output folder of a run that trained an adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generating_with_a_runs_folder(run, monkeypatch, capsys):
    """A run's folder and its adapter's give the same weights."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr("moe_jax.generation.generate", lambda model, prompt, **options: found.append(nnx.state(model)) or [])
        for model in (run, run / "adapter", run.parent / "base"):
            main(["generate", str(model), "--prompt", "the same", "--dtype", "float32"])
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    same = jax.tree.map(np.array_equal, found[0], found[2])
    assert not all(jax.tree.leaves(same))
    with pytest.raises(SystemExit):
        main(["generate", str(run), "--adapter", str(run / "adapter"), "--prompt", "x"])
    assert "is itself an adapter" in capsys.readouterr().err


@pytest.mark.thorough
def test_chatting_with_a_runs_folder(run, monkeypatch, capsys):
    """The base has no chat template; the run's is the adapter's."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    main(["chat", str(run), "--dtype", "float32", "--max-new-tokens", "4", "--max-length", "64", "--temperature", "0"])
    captured = capsys.readouterr()
    assert "experts" in captured.err and captured.out.strip()


@pytest.mark.thorough
def test_its_settings_repeat_it(run, tmp_path, capsys):
    main(["finetune", "--config", str(run / "run.yaml"), "--output", str(tmp_path / "again")])
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (tmp_path / "again" / weights).read_bytes()
    assert f"report in {tmp_path / 'again' / 'report.html'}" in capsys.readouterr().out
    assert "<h1>Fine-tuning of" in (tmp_path / "again" / "report.html").read_text()
