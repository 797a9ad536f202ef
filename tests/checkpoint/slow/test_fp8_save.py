"""Saving in FP8: the hub's names and blocks, which our loader and transformers read as the rounded values."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.commands.convert import ConvertCommand
from moe_jax.kernels import quantise_matrices
from moe_jax.layers.quantised import BlockScaled
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import (
    assert_same,
    of_transformers,
    parameters,
    read_weights,
    same_bits,
    write_checkpoint,
    write_fp8,
)
from tests.helpers.expert_layers import dequantised_matrices

SIZES = dict(hidden_size=256, intermediate_size=384, moe_intermediate_size=128, head_dim=64, num_hidden_layers=2)


def test_files_are_as_those_of_the_hub(tmp_path):
    """The written names, dtypes and shapes equal a published checkpoint's, and so are the kept modules."""
    write_fp8(tmp_path / "hub", mlp_only_layers=[1])
    moe_jax.save_pretrained(from_pretrained(tmp_path / "hub"), tmp_path / "ours", fp8=True)
    hub, ours = read_weights(tmp_path / "hub"), read_weights(tmp_path / "ours")
    assert {name: (a.dtype, a.shape) for name, a in ours.items()} == {name: (a.dtype, a.shape) for name, a in hub.items()}
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    kept = written.pop("modules_to_not_convert")
    assert written == dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    layers = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    assert set(kept) == {"lm_head", "model.layers.0.mlp.gate", *layers}


def test_both_read_the_rounded_values(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "whole", dtype=torch.bfloat16, **SIZES)
    model = from_pretrained(tmp_path / "whole")
    moe_jax.save_pretrained(model, tmp_path / "fp8", fp8=True, max_shard_bytes=300_000)
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    theirs = of_transformers(tmp_path / "fp8", torch.float32, monkeypatch)
    ours, stored = from_pretrained(tmp_path / "fp8", dtype="float32"), from_pretrained(tmp_path / "fp8", weights="as stored")
    before = parameters(model)
    for name in ("gate_up_proj", "down_proj"):
        path = ("stages", 0, "mlp", "experts", name)
        expected = quantise_matrices(jnp.asarray(before[path]))
        found = getattr(stored.stages[0].mlp.experts, name).get_value()
        np.testing.assert_array_equal(found.codes.view(jnp.uint8), expected.values.view(jnp.uint8))
        np.testing.assert_array_equal(found.scales, expected.scales)
        np.testing.assert_array_equal(parameters(ours)[path], dequantised_matrices(expected))
        assert_same(np.asarray(dequantised_matrices(expected))[1], theirs[f"model.layers.1.mlp.experts.{name}"])
    query = parameters(ours)["stages", 0, "self_attn", "q_proj", "weight"]
    assert_same(query[0], theirs["model.layers.0.self_attn.q_proj.weight"])
    assert_same(before["stages", 0, "mlp", "router", "weight"][0], theirs["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("weights", ["as stored", "fp8"])
def test_fp8_is_written_as_it_lies(tmp_path, weights):
    write_fp8(tmp_path / "hub")
    moe_jax.save_pretrained(from_pretrained(tmp_path / "hub", weights=weights), tmp_path / "ours", fp8=True)
    hub, ours = read_weights(tmp_path / "hub"), read_weights(tmp_path / "ours")
    if weights == "fp8":  # attention was whole
        hub, ours = ({name: a for name, a in files.items() if ".experts." in name} for files in (hub, ours))
    assert same_bits(hub, ours)


def test_cut_off_blocks(tmp_path):
    """DeepSeek's latent projections do not end at blocks; their last blocks are cut off, as published."""
    write_checkpoint(tmp_path / "whole", deepseek=True, hidden_size=160)
    model = from_pretrained(tmp_path / "whole", dtype="float32")
    moe_jax.save_pretrained(model, tmp_path / "fp8", fp8=True)
    written = read_weights(tmp_path / "fp8")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    rows, columns = written[name].shape
    assert written[name].dtype == torch.float8_e4m3fn and columns == 160
    assert written[f"{name}_scale_inv"].shape == (-(-rows // 128), 2)
    before, after = parameters(model), parameters(from_pretrained(tmp_path / "fp8", dtype="float32"))
    assert before.keys() == after.keys()
    for path, array in before.items():
        error = np.linalg.norm(after[path] - array)
        assert error <= 0.04 * np.linalg.norm(array), path
        assert (error > 0) == ("_proj" in str(path)), path


def test_other_forms_are_refused(tmp_path):
    write_checkpoint(tmp_path / "whole", hidden_size=64, moe_intermediate_size=64)
    with pytest.raises(ValueError, match="quantised in another form"):
        moe_jax.save_pretrained(from_pretrained(tmp_path / "whole", weights="nf4"), tmp_path / "out", fp8=True)
    model = from_pretrained(tmp_path / "whole")
    w = jnp.asarray(seeds.rng().normal(size=(2, 128, 64)), jnp.bfloat16)
    codes = BlockScaled(w.astype(jnp.float8_e4m3fn), jnp.ones((2, 2, 1)), jnp.bfloat16, block=(64, 64))
    model.stages[0].self_attn.q_proj.weight = nnx.Param(codes)
    with pytest.raises(ValueError, match="quantised in another form"):
        moe_jax.save_pretrained(model, tmp_path / "out", fp8=True)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, capsys):
    write_checkpoint(tmp_path / "whole", dtype=torch.bfloat16, **SIZES)
    ConvertCommand(str(tmp_path / "whole"), str(tmp_path / "fp8"), to="hf", fp8=True).run()
    assert "in FP8 and bfloat16" in capsys.readouterr().out
    ConvertCommand(str(tmp_path / "fp8"), str(tmp_path / "again"), to="hf", fp8=True).run()
    assert same_bits(read_weights(tmp_path / "fp8"), read_weights(tmp_path / "again"))
    with pytest.raises(ValueError, match="--fp8 is for --to hf"):
        ConvertCommand(str(tmp_path / "whole"), str(tmp_path / "orbax"), fp8=True).run()
