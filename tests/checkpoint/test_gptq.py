"""GPTQ checkpoints: their codes times their scales, whole or kept in 4 bits; other kinds are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import torch
from checkpoint_helpers import edit_config, parameters, read_weights, rewrite_weights, write_checkpoint
from flax import nnx

from moe_jax.checkpoint.hf_files import CheckpointError
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.layers.quantised import FourBits

GROUP = 32
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def packed(codes):
    """Eight codes of the first axis in one int32, as in qweight."""
    words = (codes.astype(np.uint32).reshape(-1, 8, codes.shape[1]) << (4 * np.arange(8, dtype=np.uint32))[:, None]).sum(axis=1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def write_gptq(folder, **changes) -> dict[str, np.ndarray]:
    """A checkpoint with its projections in GPTQ; returns their values by name."""
    rng, stored, values = seeds.rng(), {}, {}
    write_checkpoint(folder, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2)
    for name, tensor in read_weights(folder).items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        base, (num_out, num_in) = name.removesuffix(".weight"), tensor.shape
        codes = rng.integers(0, 16, (num_in, num_out))
        scales = rng.random((num_in // GROUP, num_out)).astype(np.float16)
        stored[f"{base}.qweight"], stored[f"{base}.scales"] = packed(codes), torch.from_numpy(scales)
        stored[f"{base}.qzeros"] = torch.full((num_in // GROUP, num_out // 8), 0x77777777, dtype=torch.int32)
        stored[f"{base}.g_idx"] = torch.arange(num_in, dtype=torch.int32) // GROUP
        values[name] = ((codes - 8) * np.repeat(scales.astype(np.float32), GROUP, axis=0)).T
    rewrite_weights(folder, stored | changes)
    edit_config(folder, quantization_config=CONFIG)
    return values


def logits(model):
    run = jax.jit(lambda state, tokens: nnx.merge(nnx.graphdef(model), state)(tokens).logits)
    return run(nnx.state(model), jnp.arange(8).reshape(1, 8))


def test_whole_and_as_stored(tmp_path):
    values = write_gptq(tmp_path)
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
