"""Fine-tuning with experts in FP8: the run computes in it, and resumes in no other precision."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

import moe_jax
from moe_jax.kernels import Precision
from moe_jax.recipes import PreferSettings, finetune, prefer
from tests.helpers import tiny


def test_a_run(tmp_path):
    """Experts and attention's projections multiply in FP8; weights are f32."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model_for_fp8(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    of_run = dict(precision="fp8", dtype="bfloat16", steps=4, seq_len=16, warmup_steps=0, fp8_dense=("attention",))
    settings = tiny.settings(tmp_path, model=str(tmp_path / "model"), learning_rate=2e-3, **of_run)
    result = finetune(settings)
    assert result.model.precision == Precision(dense=("attention",))
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert result.model.head_weight.dtype == jnp.float32
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="precision: checkpoint 'fp8', now 'bf16'"):
        finetune(replace(settings, precision="bf16", fp8_dense=()))
    with pytest.raises(ValueError, match="fp8_dense: checkpoint \\['attention'\\], now none"):
        finetune(replace(settings, fp8_dense=()))


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
