"""Fine-tuning with experts in FP8: the run computes in it, and goes on in no other precision."""

from dataclasses import replace

import pytest
import tiny

import moe_jax
from moe_jax.kernels import Precision
from moe_jax.recipes import finetune


def test_a_run(tmp_path):
    model = tiny.model_for_fp8()
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(model, tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    settings = tiny.settings(
        tmp_path,
        model=str(tmp_path / "model"),
        precision="fp8",
        dtype="bfloat16",
        steps=4,
        batch_size=4,
        gradient_accumulation=2,
        learning_rate=2e-3,
        warmup_steps=0,
        checkpoint_every=4,
    )
    result = finetune(settings)
    assert result.model.precision == Precision()
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    with pytest.raises(ValueError, match="precision: checkpoint 'fp8', now 'bf16'"):
        finetune(replace(settings, precision="bf16"))


def test_other_models_are_refused(tmp_path):
    model, tokenizer = tiny.model(), tiny.tokenizer()
    with pytest.raises(ValueError, match="hidden is 16; it must be a multiple of 128"):
        finetune(tiny.settings(tmp_path, precision="fp8", dtype="bfloat16"), model=model, tokenizer=tokenizer)
