"""`--precision` and `--weights` of commands that answer: they compute so, or refuse what cannot run before weights are read."""

import io
import json
import shutil

import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora, save_adapter
from moe_jax.cli import main
from moe_jax.kernels import Precision
from moe_jax.models.decoder import Decoder
from tests.helpers import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    tiny.tokenizer().save_pretrained(made / "tokenizer")
    for name, model in (("wide", tiny.model_for_fp8()), ("narrow", tiny.model())):
        moe_jax.save_pretrained(model, made / name, tokenizer_from=made / "tokenizer")
    moe_jax.save_pretrained(tiny.deepseek(mtp=1), made / "mtp", tokenizer_from=made / "tokenizer")
    return made


def test_generate_computes_in_fp8(folder, monkeypatch):
    found = []
    monkeypatch.setattr("moe_jax.generation.generate", lambda model, prompt, **options: found.append(model.precision) or [])
    main(["generate", str(folder / "wide"), "--prompt", "ab", "--max-new-tokens", "2", "--precision", "fp8"])
    assert found == [Precision()]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["generate --prompt ab", "chat --max-length 64"])
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


@pytest.fixture(scope="module")
def adapter(folder):
    """An adapter of the narrow model."""
    model = moe_jax.from_pretrained(folder / "narrow", progress=False)
    add_lora(model, LoraSettings(rank=2, targets=("attention",)), rngs=nnx.Rngs(0))
    save_adapter(model, folder / "adapter")
    return str(folder / "adapter")


@pytest.mark.parametrize("command", ["generate --prompt ab", "chat", "serve --port 0"])
def test_refusals(folder, adapter, command, monkeypatch, capsys):
    """Before weights are read, before `serve` opens its port, and before `chat` prints that it loads."""
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    monkeypatch.setattr("moe_jax.serving.http.server.bind", None)
    name, *options = command.split()
    for model, more, message in (
        ("narrow", ["--precision", "fp8"], "--precision fp8: FP8 does not support this model's experts: hidden is 16"),
        ("wide", ["--precision", "fp8", "--dtype", "float32"], "x is float32; it must be bfloat16; use 'bf16'"),
        ("wide", ["--precision", "fp8", "--weights", "nf4"], "multiplies weights in FP8: leave --weights 'nf4' out"),
        ("narrow", ["--weights", "nf4"], "rows of this model do not end there"),
        ("wide", ["--weights", "as stored"], "this checkpoint has none"),
        ("wide", ["--adapter", adapter], "k_proj has factors (2, 16) and (8, 2); they must be (r, 128) and (8, r)"),
        ("mtp", ["--adapter", adapter, "--drafts"], "--drafts module is for a model without an adapter"),
    ):
        with pytest.raises(SystemExit):
            main([name, str(folder / model), *options, *more])
        said = capsys.readouterr().err
        assert message in said and "loading" not in said


def test_a_dynamic_rope_is_refused_by_engines(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moe_jax.checkpoint.hf_load.from_pretrained", None)
    monkeypatch.setattr("moe_jax.serving.http.server.bind", None)
    shutil.copytree(folder / "narrow", tmp_path / "dynamic")
    file = tmp_path / "dynamic" / "config.json"
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": scaling}))
    for command in ("chat", "serve"):
        with pytest.raises(SystemExit):
            main([command, str(tmp_path / "dynamic")])
        said = capsys.readouterr().err
        assert 'with rope type "dynamic" all tokens' in said and "loading" not in said
