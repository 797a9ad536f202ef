"""Fine-tuning with experts in FP8: the run computes in it, and resumes in no other precision."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.kernels import Precision
from moe_jax.layers.lora import Frozen
from moe_jax.layers.moe import Experts
from moe_jax.recipes import PreferSettings, finetune, prefer
from tests.helpers import tiny


def _settings(tmp_path, **options):
    """Settings of four steps of a model that the folder is given."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model_for_fp8(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    of_run = dict(precision="fp8", dtype="bfloat16", steps=4, batch_size=4, seq_len=16, warmup_steps=0, checkpoint_every=4)
    return tiny.settings(tmp_path, model=str(tmp_path / "model"), **of_run, **options)


def test_a_run(tmp_path):
    """Experts and attention's projections multiply in FP8."""
    settings = _settings(tmp_path, learning_rate=2e-3, fp8_dense=("attention",))
    result = finetune(settings)
    assert result.model.precision == Precision(dense=("attention",))
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    with pytest.raises(ValueError, match="precision: checkpoint 'fp8', now 'bf16'"):
        finetune(replace(settings, precision="bf16", fp8_dense=()))
    with pytest.raises(ValueError, match="fp8_dense: checkpoint \\['attention'\\], now none"):
        finetune(replace(settings, fp8_dense=()))


@pytest.mark.thorough
def test_adapters_of_experts(tmp_path):
    """Adapters are trained on experts in FP8, whose codes stay as they were loaded."""
    settings = _settings(tmp_path, lora=LoraSettings(rank=8), weights="fp8", learning_rate=1e-2)
    result = finetune(settings)
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    experts = next(module for _, module in nnx.iter_modules(result.model) if isinstance(module, Experts))
    assert experts.precision == Precision() and np.any(experts.gate_up_lora.b[...]) and np.any(experts.down_lora.b[...])
    loaded = moe_jax.from_pretrained(settings.model, weights="fp8")
    codes = _codes(result.model)
    assert len(codes) == 2
    for (path, a), (_, b) in zip(codes, _codes(loaded), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def _codes(model):
    flat = jax.tree.leaves_with_path(nnx.state(model, Frozen))
    return [(jax.tree_util.keystr(path), a.view(np.uint8)) for path, a in flat if a.dtype == jnp.float8_e4m3fn]


def test_other_models_are_refused(tmp_path):
    model, tokenizer = tiny.model(dtype=jnp.bfloat16), tiny.tokenizer()
    with pytest.raises(ValueError, match="hidden is 16; it must be a multiple of 128"):
        finetune(tiny.settings(tmp_path, precision="fp8", dtype="bfloat16"), model=model, tokenizer=tokenizer)
    of_run = tiny.settings(tmp_path, precision="fp8", dtype="bfloat16", fp8_dense=("shared_experts",))
    with pytest.raises(ValueError, match="'shared_experts' is for shared experts, and this model has none"):
        finetune(of_run, model=tiny.model_for_fp8(), tokenizer=tokenizer)
    of_f32 = tiny.model_for_fp8(dtype=jnp.float32)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for recipe, of_recipe in (
        (finetune, replace(of_run, fp8_dense=())),
        (prefer, PreferSettings(model="none", data=str(pairs), output=str(tmp_path / "run"), precision="fp8")),
    ):
        with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
            recipe(of_recipe, model=of_f32, tokenizer=tokenizer)
        assert not (tmp_path / "run").exists()
