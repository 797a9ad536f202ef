"""`moe-jax plan --lora.*`: frozen weights have no gradients, masters and moments, and are split like trained weights."""

from dataclasses import replace

import pytest
import tyro

from moe_jax.adapters import LoraSettings
from moe_jax.adapters.add import planned_lora
from moe_jax.cli import main
from moe_jax.commands.demo import DemoCommand
from moe_jax.commands.options import options_of_lora
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.flops import num_active_parameters, num_parameters, training_flops_per_token
from moe_jax.cost.plan import plan
from moe_jax.cost.planned_step import PlannedAdapters
from moe_jax.parallel.choices import MeshShape

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]
ADAPTERS = PlannedAdapters(184_025_088, 48 * 8 * 12_000, "--lora.rank 32")
STEP = PlannedStep(QWEN, MeshShape(), 2, 4096, adapters=ADAPTERS)


def test_memory_is_that_of_frozen_weights_and_adapters():
    found = predict(STEP)
    assert found.bytes["parameters"] == 2 * num_parameters(QWEN) + 4 * ADAPTERS.parameters
    assert found.bytes["moments"] == 8 * ADAPTERS.parameters and found.bytes["gradients"] == 4 * ADAPTERS.parameters
    # 61.1 GB of weights, 2.9 of adapters, 3.7 of 8192 tokens.
    assert found.memory_bytes / 1e9 == pytest.approx(67.7, rel=0.03)
    in_halves = predict(replace(STEP, gradient_accumulation=2, moment_dtype="bfloat16"))
    assert in_halves.bytes["moments"] == 4 * ADAPTERS.parameters and in_halves.bytes["gradients"] == 8 * ADAPTERS.parameters
    everything = predict(replace(STEP, adapters=None))
    assert everything.memory_bytes > 5 * found.memory_bytes


@pytest.mark.parametrize(
    "weights, rows, sequence_length, measured",
    [
        ("whole", 8, 4096, 71.5),
        ("as stored", 8, 4096, 44.6),
        ("nf4", 8, 4096, 33.5),
        ("as stored", 2, 4096, 36.0),
        ("nf4", 1, 2048, 22.9),
    ],
)
def test_memory_by_form_of_weights(weights, rows, sequence_length, measured):
    """Within 3 % of what an H200 needed (docs/log/training.md); a layer made whole takes time."""
    adapters = ADAPTERS._replace(weights=weights)
    step = replace(STEP, rows=rows, sequence_length=sequence_length, adapters=adapters)
    found, whole = predict(step), predict(replace(step, adapters=ADAPTERS))
    assert found.memory_bytes / 2**30 == pytest.approx(measured, rel=0.03)
    assert (found.seconds["elementwise"] > whole.seconds["elementwise"]) == (weights != "whole")


def test_time_lacks_the_gradients_of_frozen_weights():
    adapted, everything = predict(STEP), predict(replace(STEP, adapters=None))
    assert all(adapted.seconds[part] < everything.seconds[part] for part in ("experts", "projections", "loss", "optimizer"))
    assert adapted.seconds["elementwise"] > everything.seconds["elementwise"]
    # One product of three is not made for each weight of a matmul; the embedding is in none.
    saved = training_flops_per_token(QWEN, 4096) - training_flops_per_token(QWEN, 4096, frozen=True)
    of_matmuls = num_active_parameters(QWEN) - QWEN.vocab_size * QWEN.hidden_size
    assert saved == pytest.approx(2 * of_matmuls, rel=1e-3)


def test_meshes_may_have_a_pipe():
    """A rank holds its layers' frozen weights and factors, and postpones no gradients of weights."""
    meshes = [found.step.mesh for found in plan(QWEN, 8, rows=64, sequence_length=4096, adapters=ADAPTERS)]
    assert {MeshShape(data=8), MeshShape(fsdp=8), MeshShape(fsdp=2, expert=4), MeshShape(pipe=8)} < set(meshes)
    factors = planned_lora(QWEN, LoraSettings(rank=32)).factors
    step = replace(STEP, mesh=MeshShape(pipe=2), rows=8, gradient_accumulation=8, adapters=ADAPTERS._replace(factors=factors))
    assert step.trained == ADAPTERS.parameters // 2
    found, everything = predict(step), predict(replace(step, adapters=None))
    assert found.bytes["gradients"] == 4 * step.trained and found.memory_bytes < everything.memory_bytes / 3
    with pytest.raises(ValueError, match="'zb-h1' postpones gradients of weights, and frozen weights have none"):
        replace(step, pipe_schedule="zb-h1")
    with pytest.raises(ValueError, match="weights='nf4' needs a mesh without pipe; got mesh.pipe=2"):
        replace(step, adapters=ADAPTERS._replace(weights="nf4"))


def test_memory_on_a_mesh():
    """Frozen matrices and adapters of experts are split; other adapters are whole, and no frozen matrix has a gradient."""
    planned = planned_lora(QWEN, LoraSettings(rank=32))
    adapters = ADAPTERS._replace(factors=planned.factors)
    assert planned.summary.parameters == ADAPTERS.parameters
    of_experts = planned.summary.kinds["experts"].parameters
    for mesh in (MeshShape(fsdp=8), MeshShape(fsdp=2, expert=4)):
        step = replace(STEP, mesh=mesh, rows=16, adapters=adapters)
        assert step.trained == ADAPTERS.parameters - of_experts * 7 // 8
        found, everything = predict(step), predict(replace(step, adapters=None))
        assert found.bytes["moments"] == 8 * step.trained
        assert found.bytes["parameters"] == pytest.approx(2 * num_parameters(QWEN) / 8 + 4 * step.trained, rel=0.005)
        assert found.bytes["workspace"] < everything.bytes["workspace"]
        assert found.seconds["once a step"] < everything.seconds["once a step"]


def test_a_large_model_fits_on_two_hosts(capsys):
    main("plan qwen3-235b-a22b --devices 16 --gpu h100 --lora.rank 32 --remat yes --limit 1".split())
    printed = capsys.readouterr().out
    assert "Train it with: moe-jax finetune --lora.rank 32 --mesh." in printed


def test_the_command_names_the_run(capsys):
    main("plan qwen3-30b-a3b --devices 1 --batch-size 8 --lora.rank 32 --lora.targets experts attention".split())
    printed = capsys.readouterr().out
    assert "LoRA trains 184,025,088 parameters next to 30,532,122,624 frozen ones" in printed
    assert "Train it with: moe-jax finetune --lora.rank 32 --lora.targets experts attention --batch-size 8" in printed
    assert "--param-dtype bfloat16" in printed
    with pytest.raises(SystemExit):
        main("plan qwen3-30b-a3b --devices 1 --gpu l40s --lora.rank 32".split())
    advice = "alone are 60: use more than 2 devices, or --weights nf4.\n"
    assert advice in capsys.readouterr().out
    main(["plan", "qwen3-30b-a3b", "--devices", "1", "--lora.rank", "32", "--weights", "as stored"])
    assert "--lora.rank 32 --weights 'as stored' --batch-size" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main("plan qwen3-30b-a3b --devices 1 --weights nf4".split())
    assert "weights='nf4' cannot be trained: train adapters instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        LoraSettings(),
        LoraSettings(rank=8, alpha=4.5, targets=("q_proj", "experts"), ranks={"experts": 2}),
        LoraSettings(shared_outer=True, use_rslora=True),
        LoraSettings(targets=("attention",), dropout=0.05),
        LoraSettings(modules_to_save=("lm_head", "norm")),
    ],
)
def test_options_come_back_as_settings(settings):
    assert tyro.cli(DemoCommand, args=options_of_lora(settings).split()).lora == settings


def test_moved_elements_of_a_token():
    dense = NAMED_CONFIGS["qwen3-0.6b"]
    moved = planned_lora(dense, LoraSettings(targets=("q_proj",))).moved_elements
    assert moved == dense.num_hidden_layers * (dense.hidden_size + 2 * dense.num_attention_heads * dense.head_dim)
    of_experts = planned_lora(QWEN, LoraSettings(targets=("experts",))).moved_elements
    assert of_experts == 48 * 8 * ((2048 + 2 * 2 * 768) + (768 + 2 * 2048))


@pytest.mark.parametrize(
    "options, advice",
    [
        ("--gpu rtx4090", "--lora.rank 16 --weights nf4"),
        ("--gpu rtx4090 --lora.rank 8", "--lora.rank 8 --weights nf4"),
        ("--precision fp8", "--lora.rank 32 --weights fp8"),
    ],
)
def test_adapters_that_would_fit_are_named(capsys, options, advice):
    with pytest.raises(SystemExit):
        main(["plan", "qwen3-30b-a3b", "--devices", "1", *options.split()])
    assert capsys.readouterr().out.endswith(f"Adapters (LoRA) fit, with {advice}.\n")


def test_no_adapters_are_named_that_a_run_would_refuse(capsys):
    """Adapters of experts that multiply in FP8 are for one device."""
    with pytest.raises(SystemExit):
        main("plan qwen3-30b-a3b --devices 2 --precision fp8".split())
    assert "Adapters" not in capsys.readouterr().out


def test_a_split_optimizer_has_a_part_of_the_moments():
    settings = LoraSettings(rank=32, modules_to_save=("lm_head",))
    planned = planned_lora(QWEN, settings)
    adapters = ADAPTERS._replace(parameters=planned.summary.parameters, factors=planned.factors)
    step = replace(STEP, adapters=adapters, mesh=MeshShape(data=2))
    whole, parts = predict(step), predict(replace(step, shard_optimizer=True))
    assert whole.bytes["moments"] == 8 * adapters.parameters == 2 * parts.bytes["moments"]
    assert parts.bytes["parameters"] == whole.bytes["parameters"] and parts.seconds["optimizer"] < whole.seconds["optimizer"]
