"""`--adapter` adds a folder's change to the weights."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import merge_adapter, save_adapter
from moe_jax.adapters.source import _last_name
from moe_jax.cli import main
from moe_jax.commands.loading import with_adapter
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import tiny
from tests.helpers.adapted_models import logits_of, with_adapters

TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(base, adapter, logits of the model with the adapter)."""
    made = tmp_path_factory.mktemp("models")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), made / "base", tokenizer_from=made / "tokenizer")
    model = with_adapters(moe_jax.from_pretrained(made / "base", dtype=jnp.float32))
    save_adapter(model, made / "adapter")
    merge_adapter(model)
    return str(made / "base"), str(made / "adapter"), np.asarray(logits_of(model, TOKENS))


def test_convert(folders, tmp_path, capsys):
    base, adapter, logits = folders
    main(["convert", base, str(tmp_path / "merged"), "--to", "hf", "--adapter", adapter])
    merged = moe_jax.from_pretrained(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(merged, TOKENS), logits, rtol=1e-5, atol=1e-5)
    printed = capsys.readouterr().err
    assert "the adapter has " in printed and "experts" in printed and "LoRA trains" not in printed


@pytest.mark.thorough
def test_generate(folders, capsys):
    base, adapter, _ = folders
    texts = []
    for options in ([], ["--adapter", adapter]):
        main(["generate", base, "--prompt", "import", "--dtype", "float32", "--max-new-tokens", "12", *options])
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.thorough
def test_an_engine_serves_it(folders):
    """`serve` and `chat` merge while loading; in f32 the tokens equal those with a separate adapter."""
    base, adapter, _ = folders
    beside = moe_jax.from_pretrained(base, adapter=adapter, dtype=jnp.float32)
    merged = with_adapter(moe_jax.from_pretrained(base, dtype=jnp.float32), adapter)
    prompts = [[5, 9, 40], [7] * 9]
    expected = [moe_jax.generate(beside, prompt, max_new_tokens=8) for prompt in prompts]
    limits = EngineLimits(max_sequences=2, max_tokens_per_step=16, max_length=64, num_pages=4)
    with contextlib.closing(Engine(merged, limits=limits)) as engine:
        found = engine.generate(prompts, SamplingOptions(max_new_tokens=8, ignore_eos=True))
    assert [one.tokens for (one,) in found] == expected
    plain = moe_jax.from_pretrained(base, dtype=jnp.float32)
    assert [moe_jax.generate(plain, prompt, max_new_tokens=8) for prompt in prompts] != expected


def test_a_run_of_all_parameters(folders, tmp_path, monkeypatch):
    """The output folder of a run names its model, as that of a run with an adapter does."""
    base, _, _ = folders
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(base)
    found = []
    monkeypatch.setattr("moe_jax.generation.generate", lambda model, prompt, **options: found.append(nnx.state(model)) or [])
    for model in (base, str(tmp_path / "run")):
        main(["generate", model, "--prompt", "import", "--dtype", "float32"])
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_another_base(folders, tmp_path, caplog):
    """An adapter that is added to other weights logs a warning, with the fingerprint in its file or by names alone."""
    base, adapter, _ = folders
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    other = moe_jax.from_config(tiny.model().config, rngs=nnx.Rngs(1), dtype=jnp.float32)
    moe_jax.save_pretrained(other, tmp_path / "other", tokenizer_from=base)
    for change, own, others in (
        (lambda: None, None, rf"trained on other weights \({base}\) than the ones in {tmp_path}/other"),
        (
            lambda: _from_elsewhere(adapter, "Qwen/Base"),
            None,
            rf"names the weights Qwen/Base, but is added to .*{tmp_path}/other",
        ),
        (lambda: _from_elsewhere(adapter, "Qwen/Tiny"), rf"names the weights Qwen/Tiny, but is added to .*{base}", None),
    ):
        change()
        for model, message in ((base, own), (str(tmp_path / "other"), others)):
            caplog.clear()
            moe_jax.from_pretrained(model, adapter=adapter)
            if message is not None:
                assert len(caplog.messages) == 1 and re.search(message, caplog.messages[0])
            elif model == base:
                assert not caplog.messages


def _from_elsewhere(adapter, base):
    """Rewrites an adapter as another program would have written it: without a fingerprint."""
    (Path(adapter) / "base_weights.json").unlink(missing_ok=True)
    config = Path(adapter) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))


@pytest.mark.parametrize("folder", ["/home/me/Qwen3-4B", "Qwen/Qwen3-4B", "/x/models--Qwen--Qwen3-4B/snapshots/0a1b"])
def test_a_model_has_one_name(folder):
    assert _last_name(folder) == "qwen3-4b"
