"""FP8 checkpoints: loading gives transformers' dequantisation, bit for bit, also in parts; saving writes bf16."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.checkpoint import hf_load
from moe_jax.checkpoint.hf_files import CheckpointError, open_tensors
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.quantised import dequantised
from tests.helpers.checkpoint_helpers import (
    assert_same,
    edit_config,
    of_transformers,
    parameters,
    quantise,
    read_weights,
    rewrite_weights,
    same_bits,
    write_fp8,
)


@pytest.mark.parametrize("dtype, scale_dtype", [("bfloat16", torch.float32), ("float32", torch.bfloat16)])
def test_equals_transformers_bit_for_bit(tmp_path, monkeypatch, dtype, scale_dtype):
    write_fp8(tmp_path, scale_dtype=scale_dtype, mlp_only_layers=[1])
    expected = of_transformers(tmp_path, getattr(torch, dtype), monkeypatch)
    model = from_pretrained(tmp_path, dtype=dtype)
    ours = parameters(model)
    for layer, stage in ((0, 0), (1, 1)):
        for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "input_layernorm.weight"):
            assert_same(ours["stages", stage, *name.split(".")][0], expected[f"model.layers.{layer}.{name}"])
    for name in ("gate_up_proj", "down_proj"):
        assert_same(ours["stages", 0, "mlp", "experts", name][0], expected[f"model.layers.0.mlp.experts.{name}"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert_same(ours["stages", 1, "mlp", name, "weight"][0], expected[f"model.layers.1.mlp.{name}.weight"])


def test_fused_experts_equal_separate_ones(tmp_path):
    write_fp8(tmp_path / "apart")
    apart = read_weights(tmp_path / "apart")
    fused, names = {}, ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for suffix in ("", "_scale_inv"):
            gate, up, down = ([apart.pop(f"{prefix}{e}.{name}{suffix}") for e in range(4)] for name in names)
            # torch cannot concatenate tensors of 8-bit floats.
            kind = gate[0].dtype
            pairs = [torch.cat([a.float(), b.float()]) for a, b in zip(gate, up, strict=True)]
            fused[f"{prefix}gate_up_proj{suffix}"] = torch.stack(pairs).to(kind)
            fused[f"{prefix}down_proj{suffix}"] = torch.stack([a.float() for a in down]).to(kind)
    (tmp_path / "fused").mkdir()
    rewrite_weights(tmp_path / "fused", apart | fused)
    (tmp_path / "fused" / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    assert same_bits(parameters(from_pretrained(tmp_path / "fused")), parameters(from_pretrained(tmp_path / "apart")))


def test_is_saved_as_plain_bf16(tmp_path):
    """The written config.json does not mention a quantisation."""
    write_fp8(tmp_path / "in")
    model = from_pretrained(tmp_path / "in")
    moe_jax.save_pretrained(model, tmp_path / "out")
    written = read_weights(tmp_path / "out")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert written.keys() == {name for name in read_weights(tmp_path / "in") if not name.endswith("_scale_inv")}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert same_bits(parameters(from_pretrained(tmp_path / "out")), parameters(model))


def store(folder, weight: torch.Tensor, scales: torch.Tensor):
    """Returns an open file that holds the two."""
    rewrite_weights(folder, {"w": weight, "w_scale_inv": scales})
    problems: list[str] = []
    tensors = open_tensors(folder, problems)
    assert not problems
    return tensors


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_reading_a_part_equals_a_part_of_the_whole(tmp_path_factory, data):
    """For blocks cut off at the edges too. A weight is its value times its block's scale."""
    rows, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    block = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    stack = data.draw(st.sampled_from([(), (3,)]))
    weight, scales = quantise(torch.randn(*stack, rows, columns), block)
    scale_of_row = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    expected = (weight.float() * scale_of_row.repeat_interleave(block[1], -1)[..., :columns]).numpy()
    tensors = store(tmp_path_factory.mktemp("fp8"), weight, scales)
    part = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size - 1))
        part.append(slice(start, data.draw(st.integers(start + 1, size))))
    problems: list[str] = []
    (found,) = dequantised(tensors, block, problems).values()
    assert not problems and found.dtype == "F32" and found.shape == expected.shape
    np.testing.assert_array_equal(found.read(tuple(part)), expected[tuple(part)])


def test_every_byte_has_its_value(tmp_path):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    (found,) = dequantised(store(tmp_path, every, torch.ones(1, 1)), (128, 128), []).values()
    values = found.read((slice(0, 2), slice(0, 128)))
    np.testing.assert_array_equal(values, every.float())
    np.testing.assert_array_equal(np.signbit(values), torch.signbit(every.float()))
    assert np.isnan(values).sum() == 2


def test_a_part_takes_its_own_bytes_and_the_scales_of_its_blocks(tmp_path):
    """Reads the part of one device of four, of 576 rows like DeepSeek-V3's kv_a_proj_with_mqa."""
    read = {}

    def counted(name, tensor):
        def count(slices):
            part = tensor.read(slices)
            read[name] = part.shape
            return part

        return replace(tensor, read=count)

    tensors = {name: counted(name, tensor) for name, tensor in store(tmp_path, *quantise(torch.randn(576, 300))).items()}
    (found,) = dequantised(tensors, (128, 128), []).values()
    found.read((slice(432, 576), slice(0, 300)))
    assert read == {"w": (144, 300), "w_scale_inv": (2, 3)}


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"


def bad_missing_scales(folder, stored):
    del stored[f"{Q}_scale_inv"], stored[f"{DOWN}_scale_inv"]
    return [f"{name}_scale_inv: missing, but {name} in model.safetensors is in FP8" for name in (Q, DOWN)]


def bad_scale_shape(folder, stored):
    stored[f"{Q}_scale_inv"] = torch.ones(2, 3)
    return [f"{Q}_scale_inv: shape [2, 3] in model.safetensors, expected [2, 2] for [256, 256] in blocks of 128 x 128"]


def bad_block_size(folder, stored):
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 128]})
    return [f"{Q}_scale_inv: shape [2, 2] in model.safetensors, expected [4, 2] for [256, 256] in blocks of 64 x 128"]


def bad_scale_dtype(folder, stored):
    stored[f"{Q}_scale_inv"] = torch.ones(2, 2, dtype=torch.int32)
    return [f"{Q}_scale_inv: dtype I32"]


def bad_scales_of_a_matrix_that_is_not_quantised(folder, stored):
    stored[Q] = stored[Q].to(torch.bfloat16)
    return [f"{Q}_scale_inv: unexpected"]


def bad_vector(folder, stored):
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)
    return ["model.norm.weight: shape [256] in model.safetensors, expected a matrix, as it is in FP8"]


def bad_matrix_shape(folder, stored):
    stored[Q], stored[f"{Q}_scale_inv"] = quantise(torch.ones(256, 300))
    return [f"{Q}: shape [256, 300] in model.safetensors, expected [256, 256]"]


def bad_other_float(folder, stored):
    stored[Q] = stored[Q].to(torch.float8_e5m2)
    return [f"{Q}: dtype F8_E5M2"]


def bad_no_mark(folder, stored):
    edit_config(folder, quantization_config=None)
    return [f"{Q}: dtype F8_E4M3", f"{Q}_scale_inv: unexpected"]


BAD = [value for name, value in list(globals().items()) if name.startswith("bad_")]


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    write_fp8(folder)
    return folder


@pytest.mark.parametrize("spoil", BAD, ids=lambda function: function.__name__)
def test_bad_checkpoints_are_refused_before_anything_is_read(fp8_folder, tmp_path, monkeypatch, spoil):
    (tmp_path / "config.json").write_text((fp8_folder / "config.json").read_text())
    stored = read_weights(fp8_folder)
    offenders = spoil(tmp_path, stored)
    rewrite_weights(tmp_path, stored)
    monkeypatch.setattr(hf_load.streaming, "load_parameter", None)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(tmp_path)
    for offender in offenders:
        assert sum(offender in problem for problem in caught.value.problems) == 1, str(caught.value)
    if spoil not in (bad_no_mark, bad_block_size, bad_other_float):
        assert len(caught.value.problems) == len(offenders)


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported, only fp8, gptq, awq, mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt' with quant_algo 'FP8' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, r"AWQ with version='gemv' \(only 'gemm'\) is not supported"),
        ({"quant_method": "gptq", "bits": 8}, r"GPTQ with bits=8 \(only 4\) is not supported"),
        ({"bits": 4}, "quant_method None is not supported"),
        ("fp8", "quantization_config='fp8' must be null or an object of fields"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported .only 'e4m3'."),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme='static' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size=None must be two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size=.0, 128. must be two positive integers"),
        ({"quant_method": "fp8", "odd": 1, "fmt": "x"}, "fmt='x' is not supported.*unknown field odd=1"),
    ],
)
def test_other_quantisations_are_refused_by_name(fp8_folder, tmp_path, quantization, message):
    (tmp_path / "config.json").write_text((fp8_folder / "config.json").read_text())
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
