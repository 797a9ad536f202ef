"""Checkpoints are distinguished by their weights, in any folder and any split into files."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.checkpoint.stored import weights_fingerprint
from moe_jax.config import NAMED_CONFIGS, config_to_dict


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": rng.normal(size=(8, 6)) for i in range(9)}
    large = {"lm_head.weight": rng.normal(size=(3, 3000)), "model.norm.weight": np.ones(6), "scale": np.array(2.0)}
    return {name: array.astype(np.float32) for name, array in (experts | large).items()}


def fingerprint(folder, tensors, files=1):
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_to_dict(NAMED_CONFIGS["qwen3-30b-a3b"])))
    return weights_fingerprint(folder)


def test_place_and_files_do_not_count(tmp_path, tensors):
    found = fingerprint(tmp_path / "one", tensors)
    assert fingerprint(tmp_path / "three", tensors, files=3) == found
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert weights_fingerprint(tmp_path / "moved") == found


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.norm.weight", "scale", *(f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in (0, 4, 8))],
)
def test_another_value_counts(tmp_path, tensors, name):
    found = fingerprint(tmp_path / "before", tensors)
    tensors[name].flat[0] += 0.01
    assert fingerprint(tmp_path / "after", tensors) != found


def test_another_dtype_counts(tmp_path, tensors):
    in_bf16 = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    assert fingerprint(tmp_path / "f32", tensors) != fingerprint(tmp_path / "bf16", in_bf16)
