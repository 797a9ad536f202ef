"""Weights in fewer bytes: FP8 as the files have it and NF4 give the whole model's results, and adapters train on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax import adapters, train
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.layers.lora import Frozen
from moe_jax.layers.quantised import BlockScaled, FourBits, is_quantised
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import write_checkpoint, write_fp8

SIZES = dict(hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose experts have rows of 64 numbers."""
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder, **SIZES)
    return folder


def logits(model):
    return jax.jit(lambda state, tokens: nnx.merge(nnx.graphdef(model), state)(tokens).logits)(
        nnx.state(model), jnp.arange(8).reshape(1, 8)
    )


def experts_of(model):
    experts = model.stages[0].mlp.experts
    return experts.gate_up_proj.get_value(), experts.down_proj.get_value()


def test_as_stored(tmp_path):
    """One byte a number of every projection; the results have the dequantised model's bits."""
    write_fp8(tmp_path)
    whole = from_pretrained(tmp_path, dtype="float32")
    stored = from_pretrained(tmp_path, dtype="float32", weights="as stored")
    assert all(isinstance(matrices, BlockScaled) for matrices in experts_of(stored))
    assert isinstance(stored.stages[0].self_attn.q_proj.weight.get_value(), BlockScaled)
    assert not nnx.state(stored, nnx.Param)
    for quantised, matrices in zip(experts_of(stored), experts_of(whole), strict=True):
        assert quantised.codes.nbytes == matrices.size and quantised.shape == matrices.shape
        np.testing.assert_array_equal(quantised[...], matrices)
    np.testing.assert_array_equal(logits(stored), logits(whole))


def test_nf4(folder):
    """The experts equal the whole model's, quantised; all else is whole."""
    whole, quantised = (from_pretrained(folder, dtype="float32", weights=weights) for weights in ("whole", "nf4"))
    experts = whole.stages[0].mlp.experts
    for name, found in zip(("gate_up_proj", "down_proj"), experts_of(quantised), strict=True):
        matrices = getattr(experts, name)
        expected = FourBits.nf4(matrices[...], jnp.float32)
        np.testing.assert_array_equal(found.codes, expected.codes)
        assert found.codes.nbytes + found.scales.nbytes == matrices.size * 4.5 / 8
        matrices[...] = expected[...]
    assert not is_quantised(quantised.stages[0].self_attn.q_proj.weight.get_value())
    np.testing.assert_array_equal(logits(quantised), logits(whole))


def test_training_beside_quantised_weights(folder):
    """Two steps of an adapter equal two steps on the dequantised matrices."""
    models = [from_pretrained(folder, dtype="float32", weights="nf4") for _ in range(2)]
    experts = models[1].stages[0].mlp.experts
    experts.gate_up_proj, experts.down_proj = (Frozen(matrices[...]) for matrices in experts_of(models[1]))
    tokens = seeds.rng().integers(0, 97, (2, 8)).astype(np.int32)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": np.ones_like(tokens), "segment_ids": np.ones_like(tokens)}
    batch["positions"] = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    trained = []
    for model in models:
        summary = adapters.add_lora(model, adapters.LoraSettings(rank=4), rngs=nnx.Rngs(0))
        optimizer = optax.adamw(1e-2)
        step = train.make_train_step(nnx.graphdef(model), optimizer, remat=True)
        state = train.init_state(model, optimizer)
        for _ in range(2):
            state, _ = step(state, batch)
        trained.append((summary, state))
    (summary, state), (expected_summary, expected) = trained
    assert summary == expected_summary and is_quantised(state.frozen) and not is_quantised(expected.frozen)
    for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_no_whole_weights(folder, tmp_path):
    """Saving and merging refuse quantised weights."""
    model = from_pretrained(folder, weights="nf4")
    with pytest.raises(ValueError, match="load the model whole"):
        moe_jax.save_pretrained(model, tmp_path / "out")
    adapters.add_lora(model, adapters.LoraSettings(rank=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="round most of the change away"):
        adapters.merge_adapter(model)
    assert not (tmp_path / "out").exists()


def test_refused(folder):
    with pytest.raises(ValueError, match="this checkpoint has none"):
        from_pretrained(folder, weights="as stored")
    with pytest.raises(ValueError, match="must be one of 'whole', 'as stored', 'nf4'"):
        from_pretrained(folder, weights="int3")
    with pytest.raises(ValueError, match="weights='fp8': .* hidden is 64; it must be a multiple of 128"):
        from_pretrained(folder, weights="fp8")


def test_nf4_needs_experts(tmp_path):
    config = moe_jax.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    moe_jax.save_pretrained(moe_jax.from_config(config, rngs=nnx.Rngs(0)), tmp_path / "dense")
    with pytest.raises(ValueError, match="makes 4 bits of experts, and this model has none"):
        from_pretrained(tmp_path / "dense", weights="nf4")
