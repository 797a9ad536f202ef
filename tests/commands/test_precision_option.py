"""`--precision fp8` of commands that answer: they compute in FP8, and refuse what it does not take before weights are read."""

import io

import pytest
import tiny

import moe_jax
from moe_jax.cli import main
from moe_jax.kernels import Precision
from moe_jax.models.decoder import Decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    for name, model in (("wide", tiny.model_for_fp8()), ("narrow", tiny.model())):
        moe_jax.save_pretrained(model, made / name, tokenizer_from=made / "tokenizer")
    return made


@pytest.mark.parametrize("command", ["generate --prompt ab", pytest.param("chat --max-length 64", marks=pytest.mark.thorough)])
def test_commands_compute_in_fp8(folder, command, monkeypatch, capsys):
    found, set_precision = [], Decoder.set_precision

    def note(model, precision):
        set_precision(model, precision)
        found.append(model.precision)

    monkeypatch.setattr(Decoder, "set_precision", note)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    name, *options = command.split()
    main([name, str(folder / "wide"), *options, "--max-new-tokens", "2", "--precision", "fp8"])
    assert found == [Precision()] and capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", ["generate --prompt ab", "chat"])
def test_refusals(folder, command, monkeypatch, capsys):
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    name, *options = command.split()
    for model, more, message in (
        ("narrow", [], "--precision fp8: FP8 does not take this model's experts: hidden is 16"),
        ("wide", ["--adapter", "none"], "--precision fp8 is for a model without an adapter on one device"),
        ("wide", ["--dtype", "float32"], "x is float32; it must be bfloat16; take 'bf16'"),
    ):
        with pytest.raises(SystemExit):
            main([name, str(folder / model), *options, *more, "--precision", "fp8"])
        assert message in capsys.readouterr().err
