"""Predicted steps of reinforcement learning: decoding as measured, memory at two peaks, and `moe-jax plan --answers`."""

import pytest

from moe_jax.cli import main
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.machine import H200
from moe_jax.cost.rollout import PlannedRollout, decode_seconds, kept_bytes, predict_rollout, rows_of
from moe_jax.parallel.choices import MeshShape

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    "sequences, context, milliseconds", [(1, 128, 3.1), (16, 128, 10.9), (64, 128, 16.5), (256, 128, 18.9), (256, 1024, 23.9)]
)
def test_decoding_is_as_measured(sequences, context, milliseconds):
    assert decode_seconds(QWEN, sequences, sequences * context, H200) * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_memory_at_both_peaks():
    """Weights that fsdp splits are there a second time during a rollout. Pages fill the memory that is left."""
    rollout = PlannedRollout(answers=1024, samples=8, prompt_tokens=200, new_tokens=1848, drawing=4)
    options = dict(rows=rows_of(rollout, 4096), sequence_length=4096, gradient_accumulation=32, moment_dtype="bfloat16")
    update = predict(PlannedStep(QWEN, MeshShape(fsdp=4), **options))
    found = predict_rollout(rollout, update)
    gib = {name: size / 2**30 for name, size in found.rollout_bytes.items()}
    assert gib["trainer"] == pytest.approx(56.9, abs=0.1) and gib["whole copy"] == pytest.approx(56.9, abs=0.1)
    assert sum(found.rollout_bytes.values()) <= H200.memory and found.fits
    assert 32 <= found.rollout.at_once < 256 and found.rollout.waves * found.rollout.at_once == 256
    assert found.seconds["update"] == update.step_seconds and 0 < found.seconds["gather"] < 1
    wide = predict_rollout(rollout, predict(PlannedStep(QWEN, MeshShape(fsdp=4), **options | dict(moment_dtype="float32"))))
    assert not wide.fits
    whole = predict_rollout(rollout, predict(PlannedStep(QWEN, MeshShape(data=4), **options)))
    assert whole.rollout_bytes["whole copy"] == whole.seconds["gather"] == 0 and not whole.fits
    assert kept_bytes(QWEN) == 96 * 1024


def test_the_command_lists_meshes_of_grpo(capsys):
    options = "--devices 4 --answers 256 --new-tokens 1848 --moment-dtype bfloat16 --param-dtype bfloat16"
    main(["plan", "qwen3-30b-a3b", *options.split()])
    printed = capsys.readouterr().out
    assert "256 answers of 1848 tokens to prompts of 200, in rows of 4096; predicted, not measured" in printed
    first, *others = [line.split() for line in printed.splitlines() if line.endswith(("yes", "no"))]
    assert first[:2] == ["1", "4"] and first[-1] == "yes" and {tuple(line[:2]) for line in others} == {("4", "1"), ("2", "2")}
    assert "GiB of the first rollout: trainer 56.9, whole copy 56.9, engine 4.7, pages" in printed
    with pytest.raises(SystemExit) as status:
        main(["plan", "qwen3-30b-a3b", "--devices", "1", "--answers", "8"])
    assert status.value.code == 1
