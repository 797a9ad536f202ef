"""What does not fit together is refused before weights are read, and nothing has been written then."""

import json
import sys

import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import AbstractMesh
from tiny import settings

from moe_jax.parallel import Parallelism
from moe_jax.parallel.mesh import MESH_AXES, MeshShape
from moe_jax.train import finetune
from moe_jax.train.run import _check_experts


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(6)])
    with pytest.raises(ValueError, match="the tokenizer has 265 tokens, and the model's vocabulary 264; take the model's own"):
        finetune(settings(tmp_path), model=tiny.model(), tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["shadow_experts", "rebalance_every"])
def test_what_needs_experts_on_several_devices_is_refused_on_one(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=1 needs experts on several devices: a mesh.expert of 2 or more"):
        finetune(settings(tmp_path, **{name: 1}), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_parameters_that_cannot_be_trained_are_refused(tmp_path):
    with pytest.raises(ValueError, match="parameters must be all float32 or all bfloat16 to be trained; there are float16"):
        finetune(settings(tmp_path), model=tiny.model(param_dtype=jnp.float16), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_is_not_the_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="settings.mesh=.*fsdp=2.*, but the model lies on .*fsdp=1.*; load it there"):
        finetune(settings(tmp_path, mesh=MeshShape(fsdp=2)), model=tiny.model(), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_experts_that_devices_do_not_divide_are_refused(tmp_path):
    parallelism = Parallelism(AbstractMesh((1, 1, 3, 1), MESH_AXES))
    with pytest.raises(ValueError, match="4 experts cannot be dealt out to mesh.expert=3 devices; take a divisor"):
        _check_experts(settings(tmp_path), parallelism, tiny.model().config)


def test_experts_that_a_model_lacks_cannot_change_places(tmp_path):
    parallelism = Parallelism(AbstractMesh((1, 1, 2, 1), MESH_AXES))
    with pytest.raises(ValueError, match="rebalance_every=1 needs a model with experts"):
        _check_experts(settings(tmp_path, rebalance_every=1), parallelism, tiny.dense().config)


def test_a_conversation_that_the_template_refuses_is_named_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["moe_jax.train.finetune"], "from_pretrained", None)
    tiny.model().save_pretrained(tmp_path / "model")
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
    # What a run leaves that ended before its first checkpoint.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="roles must alternate"):
        finetune(settings(tmp_path, model=str(tmp_path / "model"), data=str(chats["bad"])))


def test_a_misspelt_model_is_named_before_its_tokenizer_is_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="^'.*/nothing/here' is neither a folder with a checkpoint nor a model"):
        finetune(settings(tmp_path, model=str(tmp_path / "nothing" / "here")))
