"""MXFP4, NVFP4, AWQ and compressed-tensors: read whole, kept where the form allows it, or refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe_jax
from moe_jax.checkpoint.hf_files import CheckpointError
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.quantised import read_quantisation
from moe_jax.config.families import GptOssConfig
from moe_jax.layers.quantised import FourBits
from tests.helpers.adapted_models import with_adapters
from tests.helpers.checkpoint_helpers import edit_config, parameters, read_weights, rewrite_weights, write_checkpoint

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
GROUP = 32


def of_compressed_tensors(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def words(codes, order=range(8)):
    """Eight codes of the last axis in an int32: place i has code order[i]."""
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)[..., list(order)]
    return torch.from_numpy((parts << 4 * np.arange(8, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32))


def pairs(codes):
    """Two codes of the last axis in a byte, the first in the low half."""
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def int4(rng, base, num_out, num_in):
    codes, scales = rng.integers(0, 16, (num_out, num_in)), torch.rand(num_out, num_in // GROUP).bfloat16()
    stored = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([num_out, num_in])}
    return stored, (codes - 8) * np.repeat(scales.float().numpy(), GROUP, axis=1)


def awq(rng, base, num_out, num_in):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = (rng.integers(0, 16, (rows, num_out)) for rows in (num_in, num_in // GROUP))
    scales = rng.random((num_in // GROUP, num_out)).astype(np.float16)
    stored = {"qweight": words(codes, order), "qzeros": words(zeros, order), "scales": torch.from_numpy(scales)}
    zero, scale = (np.repeat(of_groups, GROUP, axis=0) for of_groups in (zeros, scales.astype(np.float32)))
    return stored, ((codes - zero) * scale).T


def nvfp4(rng, base, num_out, num_in, modelopt=False):
    codes, scales = rng.integers(0, 16, (num_out, num_in)), torch.rand(num_out, num_in // 16).to(torch.float8_e4m3fn)
    whole = np.float32(0.3)
    stored = {"weight" if modelopt else "weight_packed": pairs(codes), "weight_scale": scales}
    stored["weight_scale_2" if modelopt else "weight_global_scale"] = torch.tensor(whole if modelopt else [whole])
    stored["input_scale"] = torch.ones(1)
    of_groups = scales.float().numpy() * whole if modelopt else scales.float().numpy() / whole
    return stored, FP4[codes] * np.repeat(of_groups, 16, axis=1)


def nvfp4_of_modelopt(rng, base, num_out, num_in):
    return nvfp4(rng, base, num_out, num_in, modelopt=True)


def fp8_of_rows(rng, base, num_out, num_in, rows=None):
    codes, scales = torch.randn(num_out, num_in).to(torch.float8_e4m3fn), torch.rand(rows or num_out, 1)
    return {"weight": codes, "weight_scale": scales}, codes.float().numpy() * scales.numpy()


def fp8_of_matrices(rng, base, num_out, num_in):
    stored, values = fp8_of_rows(rng, base, num_out, num_in, rows=1)
    return stored | {"weight_scale": stored["weight_scale"].reshape(1)}, values


FORMS = {
    int4: of_compressed_tensors(type="int", num_bits=4, symmetric=True, strategy="group", group_size=GROUP),
    awq: {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    nvfp4: of_compressed_tensors(type="float", num_bits=4, symmetric=True, strategy="tensor_group", group_size=16),
    nvfp4_of_modelopt: {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    fp8_of_rows: of_compressed_tensors(type="float", num_bits=8, symmetric=True, strategy="channel"),
    fp8_of_matrices: of_compressed_tensors(type="float", num_bits=8, symmetric=True, strategy="tensor"),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_each_form_is_read_whole_and_kept(rng, tmp_path, form):
    write_checkpoint(tmp_path, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1)
    stored, values = {}, {}
    for name, tensor in read_weights(tmp_path).items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        base = name.removesuffix(".weight")
        parts, values[name] = form(rng, base, *tensor.shape)
        stored |= {f"{base}.{end}": part for end, part in parts.items()}
    rewrite_weights(tmp_path, stored)
    edit_config(tmp_path, quantization_config=FORMS[form])
    model, prefix = from_pretrained(tmp_path, dtype="float32"), "model.layers.0."
    found = parameters(model)
    np.testing.assert_array_equal(
        found["stages", 0, "self_attn", "q_proj", "weight"][0], values[f"{prefix}self_attn.q_proj.weight"]
    )
    gate, up = (values[f"{prefix}mlp.experts.2.{name}.weight"] for name in ("gate_proj", "up_proj"))
    np.testing.assert_array_equal(found["stages", 0, "mlp", "experts", "gate_up_proj"][0, 2], np.concatenate([gate, up]))
    if form is awq:
        with pytest.raises(ValueError, match="this checkpoint has none that can be kept"):
            from_pretrained(tmp_path, weights="as stored")
        return
    kept = from_pretrained(tmp_path, dtype="float32", weights="as stored").stages[0].mlp.experts.gate_up_proj.get_value()
    assert kept.codes.dtype == (jnp.float8_e4m3fn if "fp8" in form.__name__ else jnp.uint8)
    np.testing.assert_array_equal(kept[...], found["stages", 0, "mlp", "experts", "gate_up_proj"])


@pytest.fixture
def mxfp4(rng, tmp_path):
    """A tiny gpt-oss in MXFP4, and its twin in bf16 with the numbers that transformers decodes."""
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model = moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for folder in ("packed", "plain"):
        moe_jax.save_pretrained(model, tmp_path / folder, progress=False)
    plain = read_weights(tmp_path / "plain")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, num_in, num_out = packed.pop(name).shape
        packed[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (experts, num_out, num_in // 32, 16), dtype=np.uint8))
        packed[f"{name}_scales"] = torch.from_numpy(rng.integers(110, 125, (experts, num_out, num_in // 32), dtype=np.uint8))
        plain[name] = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
    rewrite_weights(tmp_path / "packed", packed)
    rewrite_weights(tmp_path / "plain", plain)
    edit_config(tmp_path / "packed", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tmp_path / "packed", tmp_path / "plain"


def test_mxfp4_is_decoded_as_by_transformers(mxfp4):
    packed, plain = (parameters(from_pretrained(folder, progress=False)) for folder in mxfp4)
    assert packed.keys() == plain.keys()
    for path, array in plain.items():
        np.testing.assert_array_equal(packed[path], array, err_msg=str(path))


def test_mxfp4_is_kept_in_four_bits_under_adapters(mxfp4):
    kept, whole = (from_pretrained(mxfp4[0], dtype="float32", weights=form) for form in ("as stored", "whole"))
    for name in ("gate_up_proj", "down_proj"):
        of_kept, of_whole = (getattr(model.stages[0].mlp.experts, name).get_value() for model in (kept, whole))
        assert isinstance(of_kept, FourBits) and of_kept.codes.nbytes == of_whole.size / 2
        np.testing.assert_array_equal(of_kept[...], of_whole)
    logits = jax.eval_shape(lambda model: model(jnp.ones((1, 8), jnp.int32)).logits, with_adapters(kept))
    assert logits.shape == (1, 8, 64)


def test_damaged_tensors_are_named(mxfp4):
    folder, name = mxfp4[0], "model.layers.1.mlp.experts.down_proj"
    whole = read_weights(folder)
    rewrite_weights(folder, whole | {f"{name}_scales": whole[f"{name}_scales"][..., :0]})
    with pytest.raises(CheckpointError, match=r"down_proj: has blocks U8 .*, scales U8 \[4, 64, 0\], expected .*\[4, 64, 1\]"):
        from_pretrained(folder)
    del whole[f"{name}_scales"]
    rewrite_weights(folder, whole)
    with pytest.raises(CheckpointError, match="down_proj: has blocks, and lacks scales"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        (of_compressed_tensors(type="int", num_bits=8, strategy="channel"), "weights {.*'num_bits': 8.* is not supported"),
        (of_compressed_tensors(type="int", num_bits=4, strategy="group", group_size=32, symmetric=False), "not supported"),
        (of_compressed_tensors(type="int", num_bits=4, strategy="group", group_size=32, actorder="group"), "not supported"),
        (of_compressed_tensors(type="int", num_bits=4, strategy="group", group_size="32"), "not supported"),
        ({"quant_method": "compressed-tensors"}, "must have weights of one kind for all modules; got"),
        (FORMS[fp8_of_rows] | {"sparsity_config": {"format": "24"}}, "sparsity_config=.* is not supported"),
        ({"quant_method": "awq", "bits": 8}, r"AWQ with bits=8 \(only 4\) is not supported"),
    ],
)  # fmt: skip
def test_other_settings_are_refused(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fields}))
    with pytest.raises(ValueError, match=message):
        read_quantisation(tmp_path)
