"""`--adapter` adds a folder's change to the weights."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from adapted_models import with_adapters

import moe_jax
from moe_jax.adapters import merge_adapter, save_adapter
from moe_jax.cli import main

TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.fixture
def folders(tmp_path):
    """(base, adapter, logits of the model with the adapter)."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    model = with_adapters(moe_jax.from_pretrained(tmp_path / "base", dtype=jnp.float32))
    save_adapter(model, tmp_path / "adapter")
    merge_adapter(model)
    return str(tmp_path / "base"), str(tmp_path / "adapter"), np.asarray(model(TOKENS).logits)


def test_convert(folders, tmp_path, capsys):
    base, adapter, logits = folders
    main(["convert", base, str(tmp_path / "merged"), "--to", "hf", "--adapter", adapter])
    merged = moe_jax.from_pretrained(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(merged(TOKENS).logits, logits, rtol=1e-5, atol=1e-5)
    assert "experts" in capsys.readouterr().err


def test_generate(folders, capsys):
    base, adapter, _ = folders
    texts = []
    for options in ([], ["--adapter", adapter]):
        main(["generate", base, "--prompt", "import", "--dtype", "float32", "--max-new-tokens", "12", *options])
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
