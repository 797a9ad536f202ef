"""Fine-tuning with adapters on several devices along data: the losses of one device, and a run that moves between both."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import FinetuneSettings, finetune
from tests.helpers import tiny


@pytest.mark.thorough
def test_losses_are_those_of_one_device(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    paths = dict(model=str(tmp_path / "base"), data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / "one"))
    options = dict(seq_len=32, batch_size=8, steps=4, learning_rate=2e-2, warmup_steps=0, checkpoint_every=2, dtype="float32")
    one = FinetuneSettings(**paths, **options, lora=LoraSettings(rank=4))

    def losses(settings, **stop):
        return [record["loss"] for record in finetune(settings, **stop).metrics]

    expected = losses(one)
    half = losses(replace(one, output=str(tmp_path / "half")), stop_after=2)
    assert half == expected[:2]
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    many = replace(one, output=str(tmp_path / "many"), mesh=MeshShape(data=8))
    np.testing.assert_allclose(losses(many), expected, rtol=1e-4)
    np.testing.assert_allclose(losses(replace(many, output=str(tmp_path / "moved"))), expected, rtol=1e-4)


def test_other_meshes_are_refused_of_a_model_that_lies_there(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "base")
    model = moe_jax.from_pretrained(tmp_path / "base", mesh=moe_jax.parallel.make_mesh(fsdp=8))
    with pytest.raises(ValueError, match="lora trains on one device, or on several along mesh.data alone.*got mesh.fsdp=8"):
        finetune(tiny.settings(tmp_path, batch_size=8, lora=LoraSettings()), model=model, tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()
