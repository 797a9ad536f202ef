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


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(6)])
    with pytest.raises(ValueError, match="the tokenizer has 265 tokens, and the model's vocabulary 264; use the model's own"):
        finetune(settings(tmp_path), model=tiny.model(), tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["shadow_experts", "rebalance_every"])
def test_what_needs_experts_on_several_devices_is_refused_on_one(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=1 needs experts on several devices: a mesh.expert of 2 or more"):
        finetune(settings(tmp_path, **{name: 1}), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_tokens_in_fp8_on_one_device(tmp_path):
    options = dict(precision="fp8", dtype="bfloat16", tokens_in_fp8=True)
    with pytest.raises(ValueError, match="tokens_in_fp8=True needs experts on several devices: a mesh.expert of 2 or more"):
        check_experts(settings(tmp_path, **options), None, tiny.model_for_fp8().config)


def test_optimizer_on_one_device_along_data(tmp_path):
    with pytest.raises(ValueError, match="shard_optimizer=True needs several devices along data: a mesh.data of 2 or more"):
        finetune(settings(tmp_path, shard_optimizer=True), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


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


def test_a_tokenizer_whose_files_cannot_be_passed_on_is_refused(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("[UNK]\nwords\n")
    with pytest.raises(FileNotFoundError, match="tokenizer.* has no tokenizer; it must hold one of tokenizer.json, "):
        finetune(settings(tmp_path, tokenizer=str(tmp_path / "tokenizer")), model=tiny.model())
    assert not (tmp_path / "run").exists()


def test_parameters_that_cannot_be_trained_are_refused(tmp_path):
    with pytest.raises(ValueError, match="parameters must be all float32 or all bfloat16 to be trained; there are float16"):
        finetune(settings(tmp_path), model=tiny.model(param_dtype=jnp.float16), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_is_not_the_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="settings.mesh=.*fsdp=2.*, but the model is on .*fsdp=1.*; load it there"):
        finetune(settings(tmp_path, mesh=MeshShape(fsdp=2)), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_experts_that_devices_do_not_divide_are_refused(tmp_path):
    parallelism = Parallelism(AbstractMesh((1, 1, 1, 3, 1), MESH_AXES))
    with pytest.raises(ValueError, match="4 experts cannot be divided among mesh.expert=3 devices; use a divisor"):
        check_experts(settings(tmp_path), parallelism, tiny.model().config)


def test_experts_that_a_model_lacks_cannot_change_places():
    with pytest.raises(ValueError, match="rebalance_every=1 needs a model with experts"):
        _check_rebalancing(1, tiny.dense().config, 2)


def test_held_out_text_of_another_format_is_refused(tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "words"}))
    with pytest.raises(
        ValueError, match="eval_data='.*held.jsonl' has the format text, and data='.*texts' folder: their losses"
    ):
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
