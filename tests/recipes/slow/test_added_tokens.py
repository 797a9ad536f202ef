"""Runs that add tokens: their rows are trained next to adapters, the tokenizer is saved, and a run resumes bit for bit."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.adapters.source import source_of
from moe_jax.checkpoint.tokenizer import load_tokenizer
from moe_jax.cli import main
from moe_jax.recipes import finetune
from moe_jax.recipes.run.folder import export
from moe_jax.train.model_of_run import model_of_run
from tests.helpers import tiny
from tests.helpers.adapted_models import logits_of

TOKENS = tuple(f"<|tool {number}|>" for number in range(6))
"""The first five have rows in the table of 264 that no token uses; the last one extends it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), folder / "model", tokenizer_from=folder / "tokenizer")
    return folder / "model"


def settings_of(folder, base, **changes):
    data = folder / "chats.jsonl"
    data.write_text(f'{{"text": "plain {TOKENS[0]} words {TOKENS[5]} and {TOKENS[5]} words"}}\n' * 8)
    options = dict(model=str(base), data=str(data), steps=4, warmup_steps=0, checkpoint_every=2, add_tokens=TOKENS)
    return replace(tiny.settings(folder), **options | dict(lora=LoraSettings(rank=2, targets=("attention",))) | changes)


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.thorough
def test_a_run_with_adapters(base, tmp_path):
    settings = settings_of(tmp_path, base)
    assert finetune(settings, stop_after=2).step == 2
    result = finetune(settings)
    whole = finetune(replace(settings, output=str(tmp_path / "whole")))
    assert all(np.array_equal(a, b) for a, b in zip(leaves(result.model), leaves(whole.model), strict=True))
    rows, table = (np.asarray(a[...]) for a in (result.model.lm_head.token_rows.rows, result.model.lm_head.weight))
    assert (
        rows.shape == (6, 16) and table.shape == (265, 16) and result.model.lm_head.token_rows.tokens == tuple(range(259, 265))
    )
    np.testing.assert_array_equal(table[259:], np.tile(table[264], (6, 1)))
    assert (rows != table[259:]).all(1).any()
    tokens = jnp.arange(256, 265)[None]
    expected = logits_of(result.model, tokens)
    folder = export(result.model, settings)
    tokenizer = load_tokenizer(source_of(settings.output).tokenizer)
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == list(range(259, 265))
    for read in (
        moe_jax.from_pretrained(settings.output, dtype=jnp.float32),
        moe_jax.from_pretrained(base, adapter=folder, dtype=jnp.float32),
        model_of_run(settings.output, dtype=jnp.float32),
    ):
        np.testing.assert_allclose(logits_of(read, tokens), expected, rtol=1e-5, atol=1e-6)
    main(["generate", settings.output, "--prompt", TOKENS[5], "--max-new-tokens", "1", "--dtype", "float32"])
    main(["convert", settings.output, str(tmp_path / "merged"), "--merge", "--dtype", "float32"])
    merged = moe_jax.from_pretrained(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(merged, tokens), expected, rtol=1e-5, atol=1e-6)
    assert len(load_tokenizer(tmp_path / "merged")) == merged.config.vocab_size == 265


def test_a_run_of_all_parameters(base, tmp_path):
    settings = settings_of(tmp_path, base, lora=None, steps=1)
    folder = export(finetune(settings).model, settings)
    assert moe_jax.from_pretrained(folder).config.vocab_size == len(load_tokenizer(folder)) == 265


@pytest.mark.parametrize(
    "tokens, message",
    [
        (("<|end|>", "new"), "add_tokens: the tokenizer already has '<|end|>'; leave them out"),
        (("new", "new"), r"add_tokens=\('new', 'new'\) has a token twice"),
        (("",), "must be a tuple of texts that are not empty"),
    ],
)
def test_refused(base, tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        finetune(settings_of(tmp_path, base, add_tokens=tokens))
    assert not Path(tmp_path / "run").exists()
