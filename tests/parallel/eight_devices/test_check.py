"""A check over several devices finds the same as a check on one device."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.check.report import passes_over
from moe_jax.cli import main
from tests.helpers import tiny
from tests.helpers.meshes import laid_out

TOKENS = [5, 3, 260, 3, 3, 17, 80]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make, sizes",
    [
        (tiny.model, dict(expert=4)),
        (tiny.deepseek, dict(data=2, fsdp=2, expert=2)),
        (tiny.dense, dict(fsdp=2, context=3)),
    ],
    ids=["experts", "deepseek", "dense"],
)
def test_equals_one_device(make, sizes):
    model = make()
    results = []
    for held in (model, laid_out(model, **sizes)):
        forward, both, arguments = passes_over(held, TOKENS)
        results.append((jax.jit(forward)(*arguments), jax.jit(both)(*arguments)))
    for one, several in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.thorough
def test_command_takes_devices(tmp_path, capsys):
    tiny.tokenizer_with_a_beginning().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    reports = []
    for devices in (1, 2):
        report = tmp_path / f"{devices}.json"
        options = f"--prompt a --dtype float32 --repeats 1 --devices {devices} --json {report}"
        main(["check", str(tmp_path / "model"), *options.split()])
        reports.append(json.loads(report.read_text()))
    assert "2 x cpu, float32, 2 tokens" in capsys.readouterr().out
    one, several = reports
    assert several["next_token_id"] == one["next_token_id"]
    for name in ("logprob", "loss", "gradient_norm", "max_gradient", "min_gradient", "arrays_with_gradients"):
        np.testing.assert_allclose(several[name], one[name], rtol=1e-4)
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path / "model"), "--devices", "9"])
    assert "--devices must be 1 to 8" in capsys.readouterr().err
