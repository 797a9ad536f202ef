"""Adapters are merged into whole weights, and kept separate from quantised ones, with which engines and `generate` compute."""

import io

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora, save_adapter
from moe_jax.cli import main
from moe_jax.commands.loading import LoadingOptions, checked_loading
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.quantised import is_quantised
from tests.helpers import tiny
from tests.helpers.adapted_models import randomise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bf16, the same in FP8, and an adapter for it."""
    made = tmp_path_factory.mktemp("models")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    for name, in_fp8 in (("bf16", False), ("fp8", True)):
        model = tiny.model_for_fp8(param_dtype=jnp.bfloat16)
        moe_jax.save_pretrained(model, made / name, tokenizer_from=made / "tokenizer", fp8=in_fp8)
    add_lora(model, LoraSettings(rank=6), rngs=nnx.Rngs(0))
    randomise(model)
    save_adapter(model, made / "adapter")
    return made


@pytest.mark.parametrize(
    "base, precision, weights, form",
    [
        ("bf16", "bf16", None, "whole"),
        ("fp8", "bf16", None, "as stored"),
        ("fp8", "bf16", "whole", "whole"),
        ("bf16", "bf16", "nf4", "nf4"),
        ("bf16", "fp8", None, "fp8"),
    ],
)
def test_forms(folder, base, precision, weights, form, capsys):
    adapter = str(folder / "adapter")
    wanted = LoadingOptions(precision=precision, weights=weights)
    chosen, load = checked_loading(folder / base, adapter, wanted, mtp=False)
    assert chosen == form
    model = load()
    assert has_adapters(model) == is_quantised(nnx.state(model)) == (form != "whole")
    assert (model.precision is not None) == (precision == "fp8")
    assert "rank 6" in capsys.readouterr().err
    assert checked_loading(folder / base, None, wanted, mtp=False)[0] == (weights or ("fp8" if precision == "fp8" else "whole"))


def test_generate_beside_stored_weights(folder, capsys):
    adapter, options = str(folder / "adapter"), "--prompt ab --dtype float32 --max-new-tokens 4".split()
    main(["generate", str(folder / "fp8"), *options, "--adapter", adapter])
    text = capsys.readouterr().out.removesuffix("\n")
    beside = moe_jax.from_pretrained(folder / "fp8", adapter=adapter, weights="as stored", dtype="float32", progress=False)
    tokenizer = moe_jax.load_tokenizer(folder / "fp8")
    assert has_adapters(beside) and text == "ab" + moe_jax.complete(beside, "ab", tokenizer=tokenizer, max_new_tokens=4)


@pytest.mark.thorough
@pytest.mark.parametrize("more", [[], ["--precision", "fp8", "--dtype", "bfloat16"]])
def test_chat_beside_stored_weights(folder, more, monkeypatch, capsys):
    adapter, options = str(folder / "adapter"), "--max-length 64 --max-new-tokens 4 --dtype float32".split()
    answers = []
    for of_adapter in (["--adapter", adapter], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
        main(["chat", str(folder / "fp8"), *options, *more, *of_adapter])
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1] and answers[0].strip()
    if not more:
        beside = moe_jax.from_pretrained(folder / "fp8", adapter=adapter, weights="as stored", dtype="float32", progress=False)
        tokenizer = moe_jax.load_tokenizer(folder / "fp8")
        assert answers[0] == moe_jax.chat(beside, "ab", tokenizer=tokenizer, max_new_tokens=4) + "\n"
