"""`moe-jax plan --precision fp8`: copies, residuals and rates of experts in FP8, and what is refused."""

from dataclasses import replace

import pytest

from moe_jax.cli import main
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.layer import ExpertsWork, experts_seconds
from moe_jax.cost.machine import GPUS, H200
from moe_jax.cost.memory import copies_bytes, gathered_layer, rounding_bytes
from moe_jax.cost.plan import plan
from moe_jax.cost.plan_table import flags
from moe_jax.cost.planned_step import PlannedAdapters
from moe_jax.cost.travel import exchange_seconds, gather_seconds
from moe_jax.parallel.choices import MeshShape

DEEPSEEK = NAMED_CONFIGS["deepseek-v3"]
QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]
OF_LAYER = 128 * 3 * 2048 * 768
"""Parameters of a layer's experts."""

STEP = PlannedStep(QWEN, MeshShape(), 8, 4096, precision="fp8")


def test_layers_by_milliseconds():
    """docs/log/fp8.md, without the router: 3.11 and 11.60 in FP8, before its last kernels. bf16 has the same errors."""
    work = ExpertsWork(32768, 8, 8 * 32768, 128, 2048, 768)
    for precision, forward, both in (("bf16", 4.32, 13.29), ("fp8", 3.11, 11.60)):
        passes = experts_seconds(work, H200, precision=precision)
        assert 1e3 * passes.forward == pytest.approx(forward, rel=0.16)
        assert 1e3 * passes.total(False) == pytest.approx(both, rel=0.09)
    few = ExpertsWork(64, 8, 512, 128, 2048, 768)
    halves = [experts_seconds(few, H200, frozen=True, precision=precision).forward for precision in ("bf16", "fp8")]
    read = 1e3 * OF_LAYER / H200.hbm
    assert 1e3 * (halves[0] - halves[1]) == pytest.approx(read, rel=0.01), "weights are read in half the time"


def test_copies_are_made_once_a_step():
    found, other = predict(STEP), predict(replace(STEP, precision="bf16"))
    assert copies_bytes(STEP) == pytest.approx(2 * 48 * OF_LAYER, rel=1e-3)
    of_passes = rounding_bytes(STEP, 0), copies_bytes(replace(STEP, precision="bf16"))
    assert not any(of_passes) and other.seconds["copies"] == 0
    workspace = found.bytes["workspace"] - other.bytes["workspace"]
    # In addition, dh in FP8.
    assert workspace == pytest.approx(copies_bytes(STEP) + 8 * STEP.tokens * 2 * 768 * (1 + 4 / 128), rel=1e-3)
    assert found.seconds["copies"] == pytest.approx(5 * 48 * OF_LAYER / H200.hbm)
    in_two = replace(STEP, gradient_accumulation=2)
    assert predict(in_two).seconds["copies"] == found.seconds["copies"]
    assert found.seconds["experts"] < 0.87 * other.seconds["experts"]


def test_split_weights_are_rounded_by_each_pass():
    step = replace(STEP, mesh=MeshShape(expert=4))
    found, other = predict(step), predict(replace(step, precision="bf16"))
    assert copies_bytes(step) == found.seconds["copies"] == 0
    assert rounding_bytes(step, 0) == pytest.approx(2 * OF_LAYER / 4, rel=1e-3)
    more = found.seconds["elementwise"] - other.seconds["elementwise"]
    assert more == pytest.approx(48 * (3 + 3 + 5) * OF_LAYER / 4 / H200.hbm)
    in_place = replace(STEP, mesh=MeshShape(data=4, expert=1))
    assert copies_bytes(in_place) == copies_bytes(STEP)


@pytest.mark.parametrize("hops", ["nccl", "copies"])
def test_gathered_weights_travel_in_half_the_bytes(hops):
    step = replace(STEP, mesh=MeshShape(fsdp=4), hops=hops)
    in_bf16 = replace(step, precision="bf16")
    found, other = predict(step), predict(in_bf16)
    assert copies_bytes(step) == found.seconds["copies"] == 0
    assert rounding_bytes(step, 0) == pytest.approx(OF_LAYER, rel=1e-3), "the transposed matrices of the backward pass"
    more = found.seconds["elementwise"] - other.seconds["elementwise"]
    assert more == pytest.approx(48 * (2 * 3 / 4 + 2) * OF_LAYER / H200.hbm), "a device rounds its own part"
    assert gathered_layer(in_bf16, 0) - gathered_layer(step, 0) == pytest.approx(OF_LAYER, rel=1e-3)
    # Experts are nearly all of a layer. Gradients travel as before.
    half, whole = (gather_seconds(each, 0, H200) for each in (step, in_bf16))
    assert half[0].travel == pytest.approx(whole[0].travel / 2, rel=0.08)
    gradients = (backward.travel - forward.travel for forward, backward in (half, whole))
    assert next(gradients) == pytest.approx(next(gradients))


def test_parts_that_cut_blocks_travel_in_bf16():
    """128 experts are no multiple of 256 devices: each has 6 rows of a matrix."""
    step = replace(STEP, mesh=MeshShape(fsdp=256), rows=256)
    assert gathered_layer(step, 0) == gathered_layer(replace(step, precision="bf16"), 0)


def test_a_rank_of_a_pipe_copies_its_layers():
    """Modules that predict further tokens are split over the ranks, and gathered in FP8."""
    step = replace(STEP, mesh=MeshShape(pipe=2), gradient_accumulation=2)
    assert copies_bytes(step) == copies_bytes(STEP) / 2 and rounding_bytes(step, 0) == 0
    found, other = predict(step), predict(replace(step, precision="bf16"))
    assert found.bytes["workspace"] - other.bytes["workspace"] > copies_bytes(step)
    assert found.seconds["copies"] == predict(STEP).seconds["copies"] / 2
    with_module = PlannedStep(DEEPSEEK, MeshShape(pipe=2), 4, 4096, gradient_accumulation=2, precision="fp8")
    assert copies_bytes(with_module) > 0 and rounding_bytes(with_module, 1) == 0
    assert rounding_bytes(with_module, 2) == pytest.approx(256 * 3 * 7168 * 2048, rel=1e-3)


def test_h_in_fp8():
    """Half the bytes of h without remat."""
    step = replace(STEP, remat=False, rows=2)
    kept, other = predict(replace(step, precision="fp8_kept")), predict(step)
    saved = 48 * 8 * step.tokens * 2 * 768 * (2 - 1 - 4 / 128)
    # In addition to padding rows of blocks.
    assert other.bytes["activations"] - kept.bytes["activations"] == pytest.approx(saved, rel=0.15)


def test_frozen_experts_are_not_made_whole():
    adapters = PlannedAdapters(184_025_088, 48 * 8 * 12_000, "--lora.rank 32 --weights fp8", "fp8")
    in_bf16 = replace(STEP, precision="bf16", adapters=adapters)
    step = replace(in_bf16, precision="fp8")
    found, other = predict(step), predict(in_bf16)
    assert found.bytes["parameters"] == other.bytes["parameters"] and copies_bytes(step) == 0
    assert rounding_bytes(step, 0) == pytest.approx(OF_LAYER, rel=1e-3)
    assert other.bytes["workspace"] - found.bytes["workspace"] == pytest.approx(
        OF_LAYER - 8 * STEP.tokens * 2 * 768 * (1 + 4 / 128), rel=0.01
    )
    assert found.seconds["elementwise"] < other.seconds["elementwise"]


@pytest.mark.parametrize("devices", [4, 16])
def test_tokens_in_fp8(devices):
    """Tokens are about half of what travels forward, by `gather` and by `all_to_all`, and travel in half the bytes."""
    of_mesh = replace(STEP, mesh=MeshShape(expert=devices), rows=2 * devices, remat=False)
    step = replace(of_mesh, tokens_in_fp8=True)
    half, whole = (exchange_seconds(each, H200) for each in (step, of_mesh))
    saved = whole.forward - half.forward
    assert whole.again - half.again == pytest.approx(saved) and half.backward == whole.backward
    assert saved == pytest.approx(whole.forward / 4, rel=0.25)
    bytes_saved = predict(of_mesh).bytes["activations"] - predict(step).bytes["activations"]
    assert bytes_saved == pytest.approx(48 * step.received * 2048 * (2 - 1 - 4 / 128), rel=1e-3)
    assert "--tokens-in-fp8" in flags(step) and "--tokens-in-fp8" not in flags(replace(step, mesh=MeshShape(fsdp=devices)))
    with pytest.raises(ValueError, match="tokens_in_fp8=True needs precision='fp8' or 'fp8_kept'; got 'bf16'"):
        replace(step, precision="bf16")


def test_the_command_plans_tokens_in_fp8(monkeypatch, capsys):
    found = []

    def note(*arguments, **options):
        found.extend(plan(*arguments, **options))
        return found

    monkeypatch.setattr("moe_jax.cost.plan.plan", note)
    main("plan qwen3-30b-a3b --devices 8 --precision fp8 --tokens-in-fp8 --remat yes".split())
    assert found and all(prediction.step.tokens_in_fp8 for prediction in found)
    with pytest.raises(SystemExit):
        main("plan qwen3-30b-a3b --devices 8 --tokens-in-fp8".split())
    assert "tokens_in_fp8=True needs experts that multiply in FP8" in capsys.readouterr().err


def test_the_command(capsys):
    main("plan qwen3-30b-a3b --devices 8 --precision fp8 --remat yes".split())
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows and all(line.endswith("FP8") for line in rows)
    assert "The first needs what was never run on GPUs: training in FP8." in printed
    assert "Train it with: moe-jax finetune --precision fp8 --mesh." in printed
    main("plan qwen3-30b-a3b --devices 1 --lora.rank 32 --weights fp8 --precision fp8".split())
    assert "finetune --lora.rank 32 --weights fp8 --precision fp8 --batch" in capsys.readouterr().out
    for options, reason in (
        ("qwen3-30b-a3b --lora.rank 32", "give weights='fp8', which keeps them in FP8; got 'whole'"),
        ("qwen3-30b-a3b --gpu a100", "precision='fp8' has kernels for Hopper GPUs alone; on NVIDIA A100 80 GB take 'bf16'"),
        ("qwen3-0.6b", "FP8 is for experts, and this model has none; use 'bf16'"),
    ):
        with pytest.raises(SystemExit):
            main(f"plan {options} --devices 1 --precision fp8".split())
        assert reason in capsys.readouterr().err
    assert predict(STEP, GPUS["h100"]).step_seconds > 0
    with pytest.raises(ValueError, match="precision='fp8' needs pipe_schedule='uniform'; got 'zb-h1'"):
        replace(STEP, mesh=MeshShape(pipe=2), gradient_accumulation=4, pipe_schedule="zb-h1")
