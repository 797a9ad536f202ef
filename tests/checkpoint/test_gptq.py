"""GPTQ checkpoints: their codes times their scales, whole or kept in 4 bits; other kinds are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.checkpoint.hf_files import CheckpointError
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.quantised import read_quantisation
from moe_jax.layers.quantised import FourBits
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import edit_config, parameters, read_weights, rewrite_weights, write_checkpoint

GROUP = 32
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def packed(codes):
    """Eight codes of the first axis in one int32, as in qweight."""
    words = (codes.astype(np.uint32).reshape(-1, 8, codes.shape[1]) << (4 * np.arange(8, dtype=np.uint32))[:, None]).sum(axis=1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def write_gptq(folder, group_size=GROUP, **changes) -> dict[str, np.ndarray]:
    """A checkpoint with its projections in GPTQ; returns their values by name."""
    rng, stored, values = seeds.rng(), {}, {}
    write_checkpoint(folder, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2)
    for name, tensor in read_weights(folder).items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        base, (num_out, num_in) = name.removesuffix(".weight"), tensor.shape
        codes, group = rng.integers(0, 16, (num_in, num_out)), num_in if group_size == -1 else group_size
        scales = rng.random((num_in // group, num_out)).astype(np.float16)
        stored[f"{base}.qweight"], stored[f"{base}.scales"] = packed(codes), torch.from_numpy(scales)
        stored[f"{base}.qzeros"] = torch.full((num_in // group, num_out // 8), 0x77777777, dtype=torch.int32)
        stored[f"{base}.g_idx"] = torch.arange(num_in, dtype=torch.int32) // group
        values[name] = ((codes - 8) * np.repeat(scales.astype(np.float32), group, axis=0)).T
    rewrite_weights(folder, stored | changes)
    edit_config(folder, quantization_config=CONFIG | {"group_size": group_size})
    return values


def logits(model):
    run = jax.jit(lambda state, tokens: nnx.merge(nnx.graphdef(model), state)(tokens).logits)
    return run(nnx.state(model), jnp.arange(8).reshape(1, 8))


@pytest.mark.parametrize("group_size", [GROUP, -1])
def test_whole_and_as_stored(tmp_path, group_size):
    """A group of -1 is a matrix's whole input."""
    values = write_gptq(tmp_path, group_size)
    whole, stored = (from_pretrained(tmp_path, dtype="float32", weights=weights) for weights in ("whole", "as stored"))
    found, prefix = parameters(whole), "model.layers.1."
    for name in ("q_proj", "o_proj"):
        expected = values[f"{prefix}self_attn.{name}.weight"]
        np.testing.assert_array_equal(found["stages", 0, "self_attn", name, "weight"][1], expected)
    gate, up = (values[f"{prefix}mlp.experts.2.{name}.weight"] for name in ("gate_proj", "up_proj"))
    np.testing.assert_array_equal(found["stages", 0, "mlp", "experts", "gate_up_proj"][1, 2], np.concatenate([gate, up]))
    experts, whole_experts = stored.stages[0].mlp.experts, whole.stages[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        kept = getattr(experts, name).get_value()
        assert isinstance(kept, FourBits) and 2 * kept.codes.nbytes == kept.size
        np.testing.assert_array_equal(kept[...], getattr(whole_experts, name)[...])
    np.testing.assert_array_equal(logits(stored), logits(whole))


def test_other_kinds_are_refused(tmp_path):
    base = "model.layers.0.self_attn.q_proj"
    write_gptq(tmp_path)
    whole = read_weights(tmp_path)
    for changes, message in (
        ({f"{base}.qzeros": whole[f"{base}.qzeros"] - 1}, "codes are not symmetric"),
        ({f"{base}.g_idx": whole[f"{base}.g_idx"].flip(0)}, "groups are not in order"),
        ({f"{base}.scales": whole[f"{base}.scales"][:1]}, "expected"),
    ):
        rewrite_weights(tmp_path, whole | changes)
        with pytest.raises(CheckpointError, match=message):
            from_pretrained(tmp_path)
    del whole[f"{base}.qzeros"]
    rewrite_weights(tmp_path, whole)
    with pytest.raises(CheckpointError, match="lacks qzeros"):
        from_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config=CONFIG | {"group_size": 24})
    with pytest.raises(
        CheckpointError, match="its 64 inputs are no multiple of group_size=24, so that the last group is shorter"
    ):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"group_size": 12}, r"group_size=12 must be a multiple of 8, or -1"),
        ({"bits": 8}, r"GPTQ with bits=8 \(only 4\) is not supported"),
        (
            {"dynamic": {"+:.*down.*": {"group_size": 64}}},
            r"dynamic gives modules '\+:\.\*down\.\*' {'group_size': 64}, and one",
        ),
    ],
)
def test_other_settings_are_refused(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG | fields}))
    with pytest.raises(ValueError, match=message):
        read_quantisation(tmp_path)


def test_rules_for_modules_that_change_nothing_are_accepted(tmp_path):
    dynamic = {"-:.*lm_head.*": {}, "+:.*q_proj.*": {"bits": 4, "damp_percent": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG | {"dynamic": dynamic}}))
    assert read_quantisation(tmp_path) == ("gptq", GROUP)
