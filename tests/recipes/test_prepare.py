"""Settings that do not fit together are refused before weights are read or anything is written."""

import json
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import moe_jax
from moe_jax.config.base import RopeParameters
from moe_jax.parallel import Parallelism
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.recipes import finetune
from moe_jax.recipes.finetuning.prepare import _check_rebalancing, _check_user_loss, _warn_of_far_positions
from moe_jax.recipes.run.model import check_experts, check_optimizer
from tests.helpers import tiny
from tests.helpers.tiny import settings


@pytest.mark.parametrize(
    "changes, model, message",
    [
        (dict(shadow_experts=1), {}, "shadow_experts=1 needs experts on several devices: a mesh.expert of 2 or more"),
        (dict(rebalance_every=1), {}, "rebalance_every=1 needs experts on several devices: a mesh.expert of 2 or more"),
        (dict(shard_optimizer=True), {}, "shard_optimizer=True needs several devices along data: a mesh.data of 2 or more"),
        (dict(mesh=MeshShape(fsdp=2)), {}, "settings.mesh=.*fsdp=2.*, but the model is on .*fsdp=1.*; load it there"),
        ({}, dict(param_dtype=jnp.float16), "must be all float32 or all bfloat16 to be trained; there are float16"),
    ],
)
def test_a_model_or_device_that_does_not_fit_is_refused(tmp_path, changes, model, message):
    with pytest.raises(ValueError, match=message):
        finetune(settings(tmp_path, **changes), model=tiny.model(**model), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    """One has more tokens than the model, and the files of another cannot be passed on."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(6)])
    with pytest.raises(ValueError, match="the tokenizer has 265 tokens, and the model's vocabulary 264; use the model's own"):
        finetune(settings(tmp_path), model=tiny.model(), tokenizer=tokenizer)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("[UNK]\nwords\n")
    with pytest.raises(FileNotFoundError, match="tokenizer.* has no tokenizer; it must hold one of tokenizer.json, "):
        finetune(settings(tmp_path, tokenizer=str(tmp_path / "tokenizer")), model=tiny.model())
    assert not (tmp_path / "run").exists()


def test_experts_that_do_not_fit_the_devices_are_refused(tmp_path):
    options = dict(precision="fp8", dtype="bfloat16", tokens_in_fp8=True)
    with pytest.raises(ValueError, match="tokens_in_fp8=True needs experts on several devices: a mesh.expert of 2 or more"):
        check_experts(settings(tmp_path, **options), None, tiny.model_for_fp8().config)
    parallelism = Parallelism(AbstractMesh((1, 1, 1, 3, 1), MESH_AXES))
    with pytest.raises(ValueError, match="4 experts cannot be divided among mesh.expert=3 devices; use a divisor"):
        check_experts(settings(tmp_path), parallelism, tiny.model().config)
    with pytest.raises(ValueError, match="rebalance_every=1 needs a model with experts"):
        _check_rebalancing(1, tiny.dense().config, 2)


def test_optimizer_that_data_cannot_split():
    parallelism = Parallelism(AbstractMesh((1, 7, 1, 1, 1), MESH_AXES), shard_optimizer=True)
    with pytest.raises(ValueError, match="data=7 divides no axis of any parameter that is left to split; use a divisor"):
        check_optimizer(parallelism, tiny.model().config)


@pytest.mark.parametrize("place", ["model", "model/notes.txt"])
def test_a_place_that_the_trained_model_cannot_take_is_refused(tmp_path, place):
    (tmp_path / "run" / place).parent.mkdir(parents=True)
    (tmp_path / "run" / place).touch()
    with pytest.raises(FileExistsError, match="run/model (is a file; a checkpoint is a folder|has files but no config.json)"):
        finetune(settings(tmp_path), model=tiny.model(), tokenizer=tiny.tokenizer())


def test_held_out_text_of_another_format_is_refused(tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "words"}))
    message = "eval_data='.*held.jsonl' has the format text, and data='.*texts' folder: their losses"
    with pytest.raises(ValueError, match=message):
        finetune(settings(tmp_path, eval_data=str(tmp_path / "held.jsonl")), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_held_out_text_that_is_trained_on_is_refused(tmp_path):
    data, copied = tiny.write_texts(tmp_path / "texts"), tiny.write_texts(tmp_path / "copied")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "linked.txt").symlink_to(data / "3.txt")
    for held_out, why in ((data, "0.txt too"), (copied, "the same contents"), (tmp_path / "part", "3.txt too")):
        with pytest.raises(ValueError, match=f"eval_data='{held_out}' must not be trained on, but data='.*texts' has .*{why}"):
            finetune(settings(tmp_path, eval_data=str(held_out)), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_positions_that_a_model_has_not_seen_give_a_warning(caplog):
    yarn = RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    for rope, known in ((RopeParameters(), 2048), (yarn, 4096)):
        config = replace(tiny.dense().config, max_position_embeddings=2048, rope_parameters=rope)
        _warn_of_far_positions(config, known)
        assert not caplog.messages
        _warn_of_far_positions(config, known + 1)
        assert f"seq_len={known + 1} is more than the {known} positions of the model (max_position_embeddings)" in caplog.text
        caplog.clear()


def test_refused_conversation_is_named_early(tmp_path, monkeypatch):
    """A conversation that the template refuses is named before weights are read."""
    monkeypatch.setattr(sys.modules["moe_jax.recipes.run.model"], "from_pretrained", None)
    moe_jax.save_pretrained(tiny.model(), tmp_path / "model")
    tiny.tokenizer(
        "{% if messages[0]['content'] == 'a' %}{{ raise_exception('roles must alternate') }}{% endif %}" + tiny.CHATML
    ).save_pretrained(tmp_path / "model")
    chats = {name: tmp_path / f"{name}.jsonl" for name in ("good", "bad")}
    for asked, path in zip("ba", chats.values(), strict=True):
        path.write_text(json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "c"}]}))
    for data, eval_data in (("bad", None), ("good", "bad")):
        paths = dict(data=str(chats[data]), eval_data=eval_data and str(chats[eval_data]))
        with pytest.raises(ValueError, match="bad.jsonl:1 .*roles must alternate"):
            finetune(settings(tmp_path, model=str(tmp_path / "model"), **paths))
    assert not (tmp_path / "run").exists()
    # The files of a run that ended before its first checkpoint.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="roles must alternate"):
        finetune(settings(tmp_path, model=str(tmp_path / "model"), data=str(chats["bad"])))


def test_misspelt_model_is_named_early(tmp_path):
    """A misspelt model is named before its tokenizer is looked for."""
    with pytest.raises(FileNotFoundError, match="^'.*/nothing/here' is neither a folder with a checkpoint nor a model"):
        finetune(settings(tmp_path, model=str(tmp_path / "nothing" / "here")))


def test_own_loss_cannot_overlap(tmp_path):
    chosen = settings(tmp_path, overlap_micro_batches=True, gradient_accumulation=2, mesh=MeshShape(expert=2))
    with pytest.raises(ValueError, match="overlap_micro_batches=True needs the built-in loss"):
        _check_user_loss(lambda model, batch: None, chosen, tiny.model().config)
