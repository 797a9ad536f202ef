"""A check over several devices finds the same as a check on one device."""

import json

import numpy as np
import pytest

import moe_jax
from moe_jax.cli import main
from tests.helpers import tiny


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
