"""A run's card has what the run wrote, and an upload sends a whole export with its card, or nothing."""

import json

import pytest
from flax import nnx
from huggingface_hub import ModelCard

import moe_jax
from moe_jax import cli
from moe_jax.adapters import LoraSettings, add_lora, save_adapter
from moe_jax.recipes import FinetuneSettings, PreferSettings
from moe_jax.recipes.run import card
from moe_jax.recipes.run.card import write_card
from moe_jax.recipes.run.folder import write_settings
from tests.helpers import tiny
from tests.helpers.fake_hub import hub


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run that trained all weights of a model from the hub, on a hub data set and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "chats.jsonl").touch()
    data = "owner/chats,split=train_sft,weight=3", f"{tmp_path}/secret/chats.jsonl,weight=1"
    settings = FinetuneSettings(model="org/Base-1B", data=data, output=str(tmp_path / "run"), steps=4, seed=7)
    finish(settings, [dict(step=i, loss=4 / i, tokens_per_second=1.0) for i in range(1, 5)])
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "run" / "model", progress=False)
    return tmp_path / "run"


def finish(settings, records):
    folder = tiny.Path(settings.output)
    folder.mkdir()
    write_settings(settings, command="finetune", steps=settings.steps, tokenizer=None)
    records[-1]["eval_loss"] = 1.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def adapted(tmp_path, **changes):
    """A finished run that trained an adapter of attention on preferences."""
    data = tmp_path / "pairs.jsonl"
    data.touch()
    lora = LoraSettings(rank=4, targets=("attention",))
    settings = PreferSettings(
        model="org/Base-1B", data=str(data), output=str(tmp_path / "adapted"), lora=lora, steps=2, **changes
    )
    finish(settings, [dict(step=i, loss=1 / i, tokens_per_second=1.0, reward_margin=0.25) for i in (1, 2)])
    model = tiny.dense()
    add_lora(model, lora, rngs=nnx.Rngs(0))
    save_adapter(model, tmp_path / "adapted" / "adapter", base="org/Base-1B")
    return tmp_path / "adapted"


def test_a_card_of_a_model(run):
    found = ModelCard.load(write_card(run, repository="user/fine", license="mit"))
    assert found.data.to_dict() == {
        "base_model": "org/Base-1B",
        "base_model_relation": "finetune",
        "datasets": ["owner/chats"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["moe_jax", "fine-tuning"],
    }
    for text in (
        "# fine\n",
        "All weights of [org/Base-1B](https://huggingface.co/org/Base-1B), trained by fine-tuning with moe_jax",
        "- [owner/chats](https://huggingface.co/datasets/owner/chats), split train_sft, weight 3.0",
        "- `chats.jsonl`, weight 1.0",
        "| loss of the last step | 1.0000 |",
        "| held-out loss at the end | 1.5000 |",
        "| seed | 7 |",
        'moe_jax.from_pretrained("user/fine")',
        'AutoModelForCausalLM.from_pretrained("user/fine")',
        "vllm serve user/fine",
    ):
        assert text in found.text, text
    assert str(run.parent) not in found.content and "peft" not in found.text and "smallest held-out loss." not in found.text


def test_a_card_of_an_adapter(tmp_path, monkeypatch):
    """PEFT and vLLM load it; the license and the model's type come from the base's files in the hub's cache."""
    run, cache = adapted(tmp_path), {"README.md": "---\nlicense: apache-2.0\n---\n", "config.json": '{"model_type": "qwen3"}'}
    for name, text in cache.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(card, "try_to_load_from_cache", lambda base, name: str(tmp_path / name))
    found = ModelCard.load(write_card(run))
    assert found.data.to_dict() == {
        "base_model": "org/Base-1B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["moe_jax", "dpo", "lora"],
    }
    for text in (
        "An adapter (LoRA) of [org/Base-1B]",
        "trained by DPO with",
        "| reward margin at the end | 0.2500 |",
        '| lora.targets | ["attention"] |',
        "| preference.loss | dpo |",
        'moe_jax.from_pretrained("org/Base-1B", adapter="user/name")',
        'PeftModel.from_pretrained(model, "user/name")',
        "vllm serve org/Base-1B --enable-lora --max-lora-rank 8 --lora-modules tuned=user/name",
    ):
        assert text in found.text, text
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    config |= {"modules_to_save": ["lm_head"], "base_model_name_or_path": str(tmp_path)}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    found = ModelCard.load(write_card(run, force=True))
    assert "vllm" not in found.text and str(tmp_path) not in found.content and found.data.base_model is None
    assert 'from_pretrained("path/to/the/base", adapter="user/name")' in found.text


def test_a_card_that_exists_stays(run):
    file = write_card(run)
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        write_card(run)
    assert file.read_text() == "mine"
    assert "vllm serve" in write_card(run, force=True).read_text()


def test_a_run_that_is_not_finished_has_no_card(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="give the --output of a finished run"):
        write_card(tmp_path)
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="at step 3 of 4"):
        write_card(run)


# huggingface_hub's own call of its client.
@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_a_push_sends_the_export_with_its_card(run, monkeypatch, capsys):
    with hub(monkeypatch) as there:
        cli.main(["push", str(run), "user/fine", "--private"])
        assert capsys.readouterr().out == f"{there.url}/user/fine/commit/1\n"
        assert there.private == {"user/fine": True}
    sent = there.files["user/fine"]
    assert sent == {file.name: file.read_bytes() for file in (run / "model").iterdir()}
    assert b'from_pretrained("user/fine")' in sent["README.md"]


def test_an_incomplete_export_is_refused_before_anything_is_sent(run, tmp_path, monkeypatch, capsys):
    weights = run / "model" / "model.safetensors"
    whole = weights.read_bytes()
    other = adapted(tmp_path)
    config = other / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("org/Base-1B", f"{tmp_path}/base"))

    def refusal(folder):
        with pytest.raises(SystemExit) as ended:
            cli.main(["push", str(folder), "user/fine"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    with hub(monkeypatch) as there:
        weights.write_bytes(whole[: len(whole) // 2])
        assert "model.safetensors is damaged, and nothing was sent" in refusal(run)
        weights.rename(run / "model" / "model-00001-of-00002.safetensors")
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (run / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "model-00002-of-00002.safetensors is missing" in refusal(run)
        assert "names" in (told := refusal(other)) and "others do not have; nothing was sent" in told
        assert not there.asked
        assert not (run / "model" / "README.md").exists()


def test_a_hub_that_refuses_ends_with_one_line(run, monkeypatch, capsys):
    with hub(monkeypatch) as there:
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(SystemExit):
            cli.main(["push", str(run), "user/fine"])
    assert "401" in capsys.readouterr().err and not there.files
    with pytest.raises(SystemExit):
        cli.main(["push", str(run), "user/fine"])
    assert f"the upload to {there.url} failed: " in capsys.readouterr().err
