"""Saving: transformers loads what we write, nothing is lost on the way or in a crash, and round trips keep every bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.checkpoint import hf_files, hf_save
from moe_jax.checkpoint.companions import TOKENIZER_FILES
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.config import Qwen3MoeConfig, load_config
from moe_jax.models.auto import from_config
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import MOE_SIZES, parameters, read_weights, same_bits, write_checkpoint

VARIANTS = {
    "dense tied": ("float32", dict(moe=False, tie_word_embeddings=True)),
    "dense, biases": ("bfloat16", dict(moe=False, attention_bias=True)),
    "moe": ("bfloat16", dict(norm_topk_prob=True)),
    "moe with dense layers": ("float32", dict(mlp_only_layers=[1], attention_bias=True)),
    "deepseek": ("bfloat16", dict(deepseek=True)),
    "deepseek, whole queries, two shared experts, biases": (
        "float32",
        dict(deepseek=True, q_lora_rank=None, n_shared_experts=2, attention_bias=True, tie_word_embeddings=True),
    ),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def random_model(**overrides):
    config = Qwen3MoeConfig(**{**MOE_SIZES, "eos_token_id": (3, 5), **overrides})
    return from_config(config, rngs=nnx.Rngs(seeds.integer()))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_trip_keeps_every_bit(tmp_path, name):
    """The weights survive load, save and load. transformers loads the result, with the logits of the original."""
    dtype, options = VARIANTS[name]
    reference = write_checkpoint(tmp_path / "theirs", dtype=getattr(torch, dtype), **options)
    model = from_pretrained(tmp_path / "theirs", dtype=dtype)
    moe_jax.save_pretrained(model, tmp_path / "ours")
    assert same_bits(read_weights(tmp_path / "ours"), read_weights(tmp_path / "theirs"))
    again = from_pretrained(tmp_path / "ours", dtype=dtype)
    assert again.config == model.config
    assert same_bits(parameters(again), parameters(model))

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(reference) and loaded.dtype == getattr(torch, dtype)
    # `Module.to`, which made the reference's dtype, rounds rotary tables, too. Loading does not, and makes some weights f32:
    # in transformers 5.24 DeepSeek's routers.
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert same_bits(loaded.state_dict(), reference.state_dict())
    tokens = torch.randint(0, 61, (2, 11))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, reference(tokens).logits)


def test_kimi_k2(tmp_path):
    """DeepSeek-V3 under another name is read as such, and written back under its own."""
    write_checkpoint(tmp_path / "theirs", deepseek=True)
    fields = json.loads((tmp_path / "theirs" / "config.json").read_text())
    deepseek = from_pretrained(tmp_path / "theirs", dtype="float32")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields | {"model_type": "kimi_k2"}))
    model = from_pretrained(tmp_path / "theirs", dtype="float32")
    assert type(model) is type(deepseek) and same_bits(parameters(model), parameters(deepseek))
    moe_jax.save_pretrained(model, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    assert same_bits(read_weights(tmp_path / "ours"), read_weights(tmp_path / "theirs"))


def test_shards_and_index(tmp_path):
    model = random_model()
    save_pretrained(model, tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    save_pretrained(model, tmp_path / "many", max_shard_bytes=5000)
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 3
    assert all((tmp_path / "many" / file).stat().st_size < 5000 + 2000 for file in files)  # and a header
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    stored = read_weights(tmp_path / "many")
    assert index["weight_map"].keys() == stored.keys() and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert same_bits(stored, read_weights(tmp_path / "one"))
    assert same_bits(parameters(from_pretrained(tmp_path / "many", dtype=jnp.float32)), parameters(model))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")


def test_config_files(tmp_path):
    model = random_model(norm_topk_prob=True)
    save_pretrained(model, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3MoeForCausalLM"] and fields["dtype"] == "float32"
    assert load_config(tmp_path / "out") == model.config
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [3, 5]}
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [3, 5]


def test_tokenizer_and_generation_config_are_passed_along(moe_folder, tmp_path):
    for name in TOKENIZER_FILES:
        (moe_folder / name).write_text(f"{name} {seeds.integer()}")
    (moe_folder / "generation_config.json").write_text('{"temperature": 0.6}')
    model = from_pretrained(moe_folder)
    save_pretrained(model, tmp_path / "a")
    for name in TOKENIZER_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (moe_folder / name).read_bytes()
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == {"temperature": 0.6}
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("other")
    (other / "tokenizer.model").write_text("of sentencepiece")
    save_pretrained(model, tmp_path / "a", tokenizer_from=other)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "other"
    assert (tmp_path / "a" / "tokenizer.model").read_text() == "of sentencepiece"
    assert not (tmp_path / "a" / "vocab.json").exists()  # the files of two tokenizers are not mixed
    with pytest.raises(FileNotFoundError, match="has no tokenizer; it must hold one of tokenizer.json"):
        save_pretrained(model, tmp_path / "b", tokenizer_from=tmp_path)
    assert not (tmp_path / "b").exists()


def test_tokenizer_from_a_hub_id(moe_folder, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="neither a folder with a checkpoint nor a model"):
        save_pretrained(random_model(), tmp_path / "b", tokenizer_from=tmp_path / "nothing")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "tokenizer.json").write_text("of the hub")
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hf_files.huggingface_hub, "snapshot_download", snapshot_download)
    save_pretrained(from_pretrained(moe_folder), tmp_path / "a", tokenizer_from="someone/some-model")
    assert asked == [("someone/some-model", list(TOKENIZER_FILES))]
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "of the hub"


def test_saving_into_the_folder_it_came_from(moe_folder):
    (moe_folder / "tokenizer.json").write_text("{}")
    (moe_folder / "notes.md").write_text("mine")
    (moe_folder / "logs").mkdir()
    (moe_folder / "logs" / "run.txt").write_text("mine too")
    before, others = read_weights(moe_folder), ("tokenizer.json", "notes.md", "logs/run.txt")
    assert len(list(moe_folder.glob("*.safetensors"))) > 1
    model = from_pretrained(moe_folder, dtype=jnp.float32)
    kept = {name: (moe_folder / name).read_bytes() for name in others}
    save_pretrained(model, moe_folder)
    assert same_bits(read_weights(moe_folder), before)
    assert len(list(moe_folder.glob("*.safetensors*"))) == 1  # the shards and the index of the old checkpoint are gone
    assert {name: (moe_folder / name).read_bytes() for name in others} == kept
    assert [path.name for path in moe_folder.parent.iterdir()] == [moe_folder.name]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_crash_half_way_leaves_the_old_folder_whole(tmp_path, monkeypatch, failing):
    folder = tmp_path / "out"
    save_pretrained(random_model(), folder, max_shard_bytes=5000)
    before = contents(folder)
    write, count = hf_save._write_shard, [0]

    def write_shard(shard, file):
        count[0] += 1
        if count[0] == failing:
            raise OSError("disk full")
        write(shard, file)

    monkeypatch.setattr(hf_save, "_write_shard", write_shard)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(random_model(), folder, max_shard_bytes=5000)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import sys
from flax import nnx
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.config import Qwen3MoeConfig
from moe_jax.models.auto import from_config
model = from_config(Qwen3MoeConfig(**eval(sys.argv[2])), rngs=nnx.Rngs(int(sys.argv[3])))
print("ready", flush=True)
while True:
    save_pretrained(model, sys.argv[1], max_shard_bytes=5000)
"""


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path):
    folder = tmp_path / "out"
    save_pretrained(random_model(), folder, max_shard_bytes=5000)
    command = [sys.executable, "-c", KILLED, folder, repr(MOE_SIZES), str(seeds.integer())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5 + seeds.rng().random())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    whole = folder if folder.exists() else tmp_path / ".out.previous"
    from_pretrained(whole)
    save_pretrained(random_model(), folder)
    from_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_swap_is_undone_by_the_next_save(tmp_path, monkeypatch):
    folder, model = tmp_path / "out", random_model()
    save_pretrained(model, folder)
    folder.rename(tmp_path / ".out.previous")
    with pytest.raises(FileNotFoundError, match="was cut short; the previous checkpoint is complete in"):
        from_pretrained(folder)

    def fails(shard, file):
        raise OSError("disk full")

    monkeypatch.setattr(hf_save, "_write_shard", fails)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(random_model(), folder)
    assert same_bits(parameters(from_pretrained(folder, dtype=jnp.float32)), parameters(model))


def test_somebody_elses_folder_is_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    with pytest.raises(FileExistsError, match="has files but no config.json"):
        save_pretrained(random_model(), tmp_path / "photos")
    assert contents(tmp_path) == {"photos/cat.png": b"cat"}
    with pytest.raises(FileExistsError, match="is a file"):
        save_pretrained(random_model(), tmp_path / "photos" / "cat.png")
    (tmp_path / "empty").mkdir()
    save_pretrained(random_model(), tmp_path / "empty")
    from_pretrained(tmp_path / "empty")


def test_an_irreplaceable_folder_is_refused(tmp_path, monkeypatch):
    """The current directory, its parents and mount points are refused before anything is written."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for folder in (".", ".."):
        (Path(folder) / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="is the current directory or holds it"):
            save_pretrained(random_model(), folder)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ValueError, match="disk is a mount point"):
        save_pretrained(random_model(), tmp_path / "disk")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and Path.cwd() == tmp_path / "a" / "b"


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_pretrained(random_model(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()


def test_max_shard_bytes_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be positive"):
        save_pretrained(random_model(), tmp_path / "out", max_shard_bytes=0)


def test_transposed_memory_is_written_row_major(tmp_path, monkeypatch):
    model, export = random_model(), hf_save.export
    save_pretrained(model, tmp_path / "a")
    transposed = lambda *args: ((name, np.asfortranarray(array)) for name, array in export(*args))  # noqa: E731
    monkeypatch.setattr(hf_save, "export", transposed)
    save_pretrained(model, tmp_path / "b")
    assert same_bits(read_weights(tmp_path / "b"), read_weights(tmp_path / "a"))
